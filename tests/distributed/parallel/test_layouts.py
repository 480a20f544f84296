"""Every layout trains what one process trains, measures the whole model, and resumes any other layout's checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.events.table import Event
from dalsegno.logs import RunFile
from dalsegno.testing import FaultPlan, assert_resume_equivalent, run_ranks
from support import layouts

SPREAD = pytest.mark.parametrize("layout", layouts.BY_HAND)
EXCHANGED = {
    "GradNormLogger": 1,
    "GradHistogram": 1,
    "LearningDynamics": 1,
    "ComputeNorm": 1,
    "NaNChecker": 1,
    "model flops": 1,
    "WeightNormLogger": 1,
    "MemoryMonitor": 1,
    "ExpertLoadBalance": 1,
    "RateProfiler": 1,
    "LogInputSummaries": 2,
}
"""Collectives of a record, by the built-in that it is of."""
OF_CLOCK_OR_RANK = ("runtime", "per_sec", "timestamp", "peak", "memory", "mfu")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one process."""
    [values] = run_ranks(layouts.measured, 1, tmp_path_factory.mktemp("one"), "one")
    return values


@SPREAD
def test_a_layout_trains_and_measures_what_one_process_does(tmp_path: Path, layout: str, alone: dict[str, Any]) -> None:
    """And what torch alone does, written by hand on the same mesh."""
    ranks = run_ranks(layouts.measured, layouts.LAYOUTS[layout][0], tmp_path, layout)
    for expected in (ranks[0]["by hand"], alone["weights"]):
        for name, weight in ranks[0]["weights"].items():
            torch.testing.assert_close(torch.tensor(weight), torch.tensor(expected[name]), rtol=1e-4, atol=1e-5)
    assert all(other["weights"] == ranks[0]["weights"] for other in ranks)
    logs = ranks[0]["logs"]
    assert [each["grad_norm"] for each in logs["train"] if "grad_norm" in each] == pytest.approx(
        ranks[0]["norms"], rel=1e-4
    )
    assert_same_records(logs, alone["logs"])
    assert_few_exchanges(ranks, layout)


@pytest.mark.parametrize("layout", ["pp", "pp x fsdp", "pp x tp"])
def test_a_pipeline_measures_what_one_process_does(tmp_path: Path, layout: str, alone: dict[str, Any]) -> None:
    ranks = run_ranks(layouts.measured, layouts.LAYOUTS[layout][0], tmp_path, layout)
    assert {name for each in ranks for name in each["weights"]} == alone["weights"].keys()
    for each in ranks:
        for name, weight in each["weights"].items():
            expected = torch.tensor(alone["weights"][name])
            torch.testing.assert_close(torch.tensor(weight), expected, rtol=1e-4, atol=1e-5)
    assert_same_records(ranks[0]["logs"], alone["logs"])
    assert_few_exchanges(ranks, layout)


def assert_same_records(logs: dict[str, Any], expected: dict[str, Any]) -> None:
    """But for clocks, every number in every record, up to rounding."""
    assert logs.keys() == expected.keys()
    for name, records in logs.items():
        ours, theirs = map(numbers, (records, expected[name]))
        assert ours and ours.keys() == theirs.keys(), name
        assert ours == pytest.approx(theirs, rel=2e-3, abs=1e-5), name


def assert_few_exchanges(ranks: list[dict[str, Any]], layout: str) -> None:
    """Each measurement is one collective; but spectral norms need one or two in each of eight iterations."""
    spectral = 8 * (2 if "tp" in layout else 1) + 1
    expected = EXCHANGED | {"ParameterNormLogger": 2 + spectral}
    for each in ranks:
        assert {key: count for key, count in each["exchanges"].items() if count} == expected


def numbers(records: list[dict[str, Any]]) -> dict[str, float]:
    """All numbers in records, by their place, without those that depend on clocks."""
    found: dict[str, float] = {}

    def collect(place: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                if not any(word in key for word in OF_CLOCK_OR_RANK):
                    collect(f"{place}/{key}", each)
        elif isinstance(value, list):
            for number, each in enumerate(value):
                collect(f"{place}/{number}", each)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[place] = float(value)

    collect("", records)
    return found


def test_a_checkpoint_of_any_layout_resumes_under_any_other(tmp_path: Path) -> None:
    """Bit by bit; and the weights, their averages and the optimizer state are those of one process."""
    parts = [
        ["one"],
        ["ddp", "fsdp", "tp", "pp", "tp"],
        ["pp x tp", "fsdp 4", "pp x ddp", "hsdp", "tp x fsdp", "pp x fsdp", "tp x ddp"],
        ["tp"],
        ["one"],
    ]
    step = 1
    for part in parts:
        run_ranks(layouts.chain, layouts.LAYOUTS[part[0]][0], tmp_path / "chain", part, step)
        step += len(part)
    run_ranks(layouts.chain, 1, tmp_path / "one", ["one"] * (step - 1), 1)
    for number in range(1, step):
        chained, alone = (layouts.stored(tmp_path / name, number) for name in ("chain", "one"))
        assert chained.keys() == alone.keys()
        for name, tensor in chained.items():
            torch.testing.assert_close(tensor, alone[name], rtol=1e-3, atol=1e-5)
    legs = RunFile(tmp_path / "chain").load().legs
    assert legs[3].parallel == "TensorParallel({'layers.*.up': 'ColwiseParallel', 'layers.*.down': 'RowwiseParallel'})"
    assert [leg.mesh for leg in legs[3:12]] == [
        {"tp": 2},
        {"pp": 2},
        {"tp": 2},
        {"pp": 2, "tp": 2},
        {"dp_shard": 4},
        {"pp": 2, "dp_replicate": 2, "dp_shard": 1},
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_shard": 2, "tp": 2},
        {"pp": 2, "dp_shard": 2},
    ]


@pytest.mark.parametrize("layout", ["hsdp", "tp x fsdp", "pp x tp", "pp x fsdp"])
def test_a_killed_run_resumes_on_its_layout_bit_by_bit(tmp_path: Path, layout: str) -> None:
    """With dropout: its random numbers are those of the data rank. ``durability`` kills layouts of two ranks."""
    factory = partial(layouts.trainer, layout=layout, dropout=0.3, save_steps=1, max_steps=4, **layouts.MOMENTUM)
    assert_resume_equivalent(
        factory,
        [FaultPlan(Event.STEP_END, count=3)],
        world_size=layouts.LAYOUTS[layout][0],
        folder=tmp_path,
        timeout=200,
    )


@pytest.mark.parametrize("layout", ["tp", "tp x fsdp"])
def test_an_overflow_on_one_rank_skips_the_update_on_all(tmp_path: Path, layout: str) -> None:
    """Ranks that read the same data drop out the same activations, and others do not."""
    ranks = run_ranks(layouts.overflow_on_the_last_rank, layouts.LAYOUTS[layout][0], tmp_path, layout)
    assert all(each[:2] == ranks[0][:2] for each in ranks)
    assert ranks[0][0] == [2]
    dropped = [kept for _, _, kept in ranks]
    assert dropped[0] == dropped[1]
    assert all(first == second != dropped[0] for first, second in zip(dropped[2::2], dropped[3::2], strict=True))
