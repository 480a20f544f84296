"""What is logged is the same on every rank, and the same as in one process; and all ranks decide together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.testing import run_ranks
from support.listeners import Listener
from support.ranked import (
    overflow_on_one_rank,
    train_and_listen,
    train_on_unequal_loaders,
    train_with_a_request,
)
from support.small import small_trainer

BOTH = pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
TIMES = ("_runtime", "_per_second", "effective_batch_size")
PER_RANK_OR_TIME = ("peak_mem", "rank_peak_mem", "tok_per_sec")


def comparable(records: list[tuple[str, dict[str, float]]]) -> list[tuple[str, dict[str, float]]]:
    return [
        (kind, {key: value for key, value in logs.items() if not key.endswith(TIMES) and key not in PER_RANK_OR_TIME})
        for kind, logs in records
    ]


def assert_close(found: list[Any], expected: list[Any]) -> None:
    assert [kind for kind, _ in found] == [kind for kind, _ in expected]
    for (kind, logs), (_, others) in zip(found, expected, strict=True):
        assert logs == pytest.approx(others, rel=1e-3), kind


@BOTH
@pytest.mark.parametrize("weigh", [False, True], ids=["by samples", "by loss_weight"])
def test_records_are_global(tmp_path: Path, parallel: str, weigh: bool) -> None:
    """Losses, norms before clipping, metrics of uneven evaluation sets: as one process has them on the same samples."""
    [(records, metrics)] = run_ranks(train_and_listen, 1, tmp_path / "one", "none", 2, 4, weigh)
    ranks = run_ranks(train_and_listen, 2, tmp_path / "two", parallel, 2, 2, weigh)
    for ours, each_step in ranks:
        assert_close(comparable(ours), comparable(records))
        assert each_step == [pytest.approx(step, rel=1e-3) for step in metrics]
    assert comparable(ranks[0][0]) == comparable(ranks[1][0])
    assert ranks[0][1] == ranks[1][1]
    assert max(step["grad_norm"] for step in metrics) > 0.5  # so that clipping had something to do
    evaluated = {key for kind, logs in records if kind == "eval" for key in logs if key.endswith("loss")}
    assert evaluated == {"eval_odd_loss", "eval_one_loss"}


@BOTH
@pytest.mark.parametrize(("requested", "reason"), [("stop", "stopped"), ("abort", "aborted")])
def test_one_ranks_request_stops_all_at_one_step(tmp_path: Path, parallel: str, requested: str, reason: str) -> None:
    first, second = run_ranks(train_with_a_request, 2, tmp_path, parallel, requested, "on_step_end")
    assert first[:4] == second[:4]
    step, *how, seen = first
    assert 3 <= step < 3000
    assert how == [reason, "rank 1 has had enough", "tired"]
    assert seen["save"] == ([step] if requested == "stop" else [])


def test_a_request_at_a_record_is_met_at_that_step(tmp_path: Path) -> None:
    ends = run_ranks(train_with_a_request, 2, tmp_path, "ddp", "stop", "on_log")
    assert [step for step, *_ in ends] == [3, 3]


@pytest.mark.parametrize(("requested", "what"), [("evaluate", "evaluate"), ("save", "save"), ("epoch_stop", "epoch")])
def test_every_other_request_is_met_on_all_ranks_together(tmp_path: Path, requested: str, what: str) -> None:
    first, second = run_ranks(train_with_a_request, 2, tmp_path, "ddp", requested, "on_log")
    assert first == second
    assert first[-1][what][0] == 3


def test_loaders_of_unequal_length_are_used_up(tmp_path: Path) -> None:
    """A rank that has run out waits for the others, with weight zero."""
    (losses, first, samples), (others, second, _) = run_ranks(train_on_unequal_loaders, 2, tmp_path)
    expected = [(first[0] + second[0]) / 2, (first[1] + second[1]) / 2, second[2], second[3]]
    assert losses == others == pytest.approx(expected, rel=1e-5)
    assert samples == 24


@pytest.mark.parametrize(("parallel", "where"), [("ddp", "loss"), ("fsdp", "loss"), ("fsdp", "shard")])
def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path, parallel: str, where: str) -> None:
    ranks = run_ranks(overflow_on_one_rank, 2, tmp_path, parallel, where)
    assert ranks[0][0] == ranks[1][0]
    for skipped, weights in ranks:
        assert {11, 12, 13} & set(skipped) == {12}  # the first steps find the scale
        assert weights[9] != weights[10] == weights[11] != weights[12]


@pytest.mark.parametrize("clips", [False, True])
def test_the_largest_norm_is_that_of_each_step_or_not_there(tmp_path: Path, clips: bool) -> None:
    """Without clipping and without observers, norms between two records are not computed."""
    norms: list[float] = []
    records: list[dict[str, float]] = []

    def measure(ctx: Any) -> None:
        norms.append(float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in ctx.model.parameters()]))))

    note = Listener({"on_gradients_ready": measure, "on_log": lambda ctx: records.append(dict(ctx.logs))})
    settings = {"max_steps": 6, "logging_steps": 3, "max_grad_norm": 1e-3 if clips else 0}
    small_trainer(tmp_path, note, **settings).train()
    of_training = [record for record in records if "loss" in record]
    assert [record["grad_norm"] for record in of_training] == pytest.approx([norms[2], norms[5]])
    expected = [max(norms[:3]), max(norms[3:])] if clips else [None, None]
    assert [record.get("max_grad_norm") for record in of_training] == pytest.approx(expected)
