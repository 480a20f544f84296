"""A run resumes with another number of ranks: same losses, same samples, and it reports what could not be the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

import dalsegno as ds
from dalsegno.testing import run_ranks
from support.ranked import train_part

# Eight samples a step each time: ranks, samples in a rank's micro-batch, micro-batches.
ALONE = (1, 4, 2)
ALONE_IN_ONE = (1, 8, 1)
TWO = (2, 4, 1)
TWO_ACCUMULATED = (2, 2, 2)
LENGTH = 45  # six steps an epoch, the last of five samples, which no two ranks can share evenly

Shape = tuple[int, int, int]


def train(output_dir: Path, parallel: Any, shape: Shape, stop_at: int | None = None) -> list[dict[str, Any]]:
    world_size, batch_size, accumulation = shape
    return run_ranks(train_part, world_size, output_dir, parallel, stop_at, batch_size, accumulation, LENGTH)


def seen_by_all(ranks: list[dict[str, Any]]) -> dict[int, Counter[int]]:
    seen: dict[int, Counter[int]] = {}
    for rank in ranks:
        for epoch, numbers in rank["seen"].items():
            seen.setdefault(epoch, Counter()).update(numbers)
    return seen


def assert_same_numbers(ranks: list[dict[str, Any]], unchanged: dict[str, Any]) -> None:
    for rank in ranks:
        for step, loss in rank["losses"].items():
            assert loss == pytest.approx(unchanged["losses"][step], rel=1e-4), step
            assert rank["norms"][step] == pytest.approx(unchanged["norms"][step], rel=1e-3), step


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run reports that one process has trained to its end."""
    return train(tmp_path_factory.mktemp("unchanged"), "none", ALONE)[0]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(("first", "second"), [(TWO, ALONE), (ALONE_IN_ONE, TWO)], ids=["2 to 1", "1 to 2"])
def test_the_run_goes_on(tmp_path: Path, unchanged: dict[str, Any], parallel: str, first: Shape, second: Shape) -> None:
    stop_at = 3  # in the first epoch
    before = train(tmp_path, parallel, first, stop_at)
    after = train(tmp_path, parallel, second)

    assert_same_numbers([*before, *after], unchanged)
    assert [sorted(rank["losses"]) for rank in after] == [list(range(stop_at + 1, 15))] * second[0]

    seen = seen_by_all(after)
    assert seen[0] == seen[1] == Counter(range(LENGTH))
    assert seen[2] == Counter(unchanged["seen"][2])
    assert {rank["samples"] for rank in after} == {unchanged["samples"]} == {2 * LENGTH + 2 * 8}
    assert {rank["steps counted"] for rank in after} == {14}


def test_ranks_that_share_data_count_once(tmp_path: Path, unchanged: dict[str, Any]) -> None:
    """Two ranks with different data, then two that split each layer: the same samples, and per-rank state follows."""
    before = train(tmp_path, "fsdp", TWO, 3)
    split = ds.TensorParallel({"blocks.*": ColwiseParallel(output_layouts=Replicate())})
    after = train(tmp_path, split, (2, 4, 2))
    assert_same_numbers([*before, *after], unchanged)
    assert [rank["seen"] for rank in after] == [after[0]["seen"]] * 2
    for epoch in (0, 1):
        assert Counter(after[0]["seen"][epoch]) == Counter(range(LENGTH))
    assert {rank["samples"] for rank in after} == {unchanged["samples"]}


def test_a_sample_that_only_pads_counts_nowhere(tmp_path: Path, unchanged: dict[str, Any]) -> None:
    """Five samples for two ranks with two micro-batches of two each: one rank's last micro-batch has no sample left."""
    ranks = train(tmp_path, "ddp", TWO_ACCUMULATED)
    assert_same_numbers(ranks, unchanged)
    seen = seen_by_all(ranks)
    for epoch in (0, 1):
        padding = seen[epoch] - Counter(range(LENGTH))
        assert padding.total() == 1
        assert seen[epoch] - padding == Counter(range(LENGTH))
    assert {rank["samples"] for rank in ranks} == {unchanged["samples"]}


@pytest.mark.parametrize(("first", "second"), [(TWO, ALONE), (ALONE, TWO)], ids=["2 to 1", "1 to 2"])
def test_what_cannot_be_the_same_is_reported(tmp_path: Path, first: Shape, second: Shape) -> None:
    """The generators of each rank begin anew, from the seed, the rank and the step: reproducibly."""
    train(tmp_path / "one", "ddp", first, 3)
    train(tmp_path / "other", "ddp", first, 3)
    after = train(tmp_path / "one", "ddp", second, 4)
    for rank in after:
        assert (
            f"rng: resharded from {first[0]} to {second[0]} states: each rank is seeded from (seed, data rank, step)"
            in " ".join(rank["notes"])
        )
    again = train(tmp_path / "other", "ddp", second, 4)
    draws = [rank["draw"] for rank in after]
    assert draws == [rank["draw"] for rank in again]
    assert len(set(draws)) == second[0]
