"""ComputeBudget: against FLOPs by hand, whatever the lengths, and over kills; and what its rates leave out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno.callbacks import ComputeBudget, DefaultMetrics, JsonLogger
from dalsegno.distributed import collectives
from dalsegno.events.table import Event
from dalsegno.logs import read_records
from dalsegno.testing import FaultPlan, TinyLanguageModel, assert_resume_equivalent, run_ranks
from support.listeners import Listener
from support.small import small_trainer

WIDTH = 16
PARAMETERS = 256 * WIDTH + 64 * WIDTH + 2 * (12 * WIDTH**2 + 13 * WIDTH) + 2 * WIDTH


def of_a_token(length: int) -> int:
    """Forward and twice that backward: two blocks and the head."""
    block = 2 * WIDTH * (3 * WIDTH + WIDTH + 8 * WIDTH) + 2 * 2 * length * WIDTH
    return 3 * (2 * block + 2 * WIDTH * 256)


def rows(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    every = [torch.arange(length) + number for number, length in enumerate(lengths)]
    return [{"input_ids": row, "labels": row.roll(-1)} for row in every]


def trainer(output_dir: Path, *own: ds.Callback, lengths: list[int], **settings: Any) -> ds.Trainer:
    """A sample a step on each rank, in order."""
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(rows(lengths), batch_size=1)
    alone = collectives.world_size() == 1
    how = {"optim": "sgd", "per_device_train_batch_size": 1, "parallel": "none" if alone else "fsdp", **settings}
    parts = {"train_dataset": None, "train_dataloader": loader} if alone else {"train_dataset": rows(lengths)}
    return small_trainer(output_dir, JsonLogger(), *own, model=TinyLanguageModel(width=WIDTH), parts=parts, **how)


def records(output_dir: Path) -> list[dict[str, Any]]:
    return [each for each in read_records(output_dir / "logs/train.jsonl") if "kind" not in each]


def test_each_stretch_is_summed_up_at_its_own_price(tmp_path: Path) -> None:
    """Sequences of 8, then of 32 tokens; a record every two steps, and the lengths change with one."""
    trainer(tmp_path, ComputeBudget(), lengths=[8] * 4 + [32] * 4, max_steps=8, logging_steps=2).train()
    spent, seen = 0, 0
    found = records(tmp_path)
    for each, length in zip(found, [8, 8, 32, 32], strict=True):
        spent += 2 * length * of_a_token(length)
        seen += 2 * length
        assert each["total_petaflops"] == pytest.approx(spent / 1e15, rel=1e-9)
        assert each["chinchilla_multiple"] == pytest.approx(seen / (20 * PARAMETERS), rel=1e-9)
        assert "mfu" not in each  # the peak of this hardware is not known


def test_parameters_and_their_tokens_can_be_given(tmp_path: Path) -> None:
    own = ComputeBudget(parameters=1000, tokens_per_parameter=4)
    trainer(tmp_path, own, lengths=[8] * 2, max_steps=2, logging_steps=2).train()
    assert [each["chinchilla_multiple"] for each in records(tmp_path)] == [16 / 4000]


def of_two_ranks(output_dir: Path) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    listener = Listener({"on_log": lambda ctx: kept.append({**ctx.logs})}, name="kept")
    own = [ComputeBudget(peak_flops_in_total=2e12), DefaultMetrics(peak_flops_per_device=1e12), listener]
    trainer(output_dir, *own, lengths=[16] * 8, max_steps=4, logging_steps=2).train()
    return [each for each in kept if "total_petaflops" in each]


def test_in_shards_on_two_ranks(tmp_path: Path) -> None:
    """All of the model and of the tokens is counted, and the ranks say the same."""
    ours, theirs = run_ranks(of_two_ranks, 2, tmp_path)
    assert ours == theirs
    assert [each["total_petaflops"] for each in ours] == pytest.approx([n * 64 * of_a_token(16) / 1e15 for n in (1, 2)])
    assert [each["chinchilla_multiple"] for each in ours] == pytest.approx([n * 64 / 20 / PARAMETERS for n in (1, 2)])
    for each in ours:
        devices_do = each["tokens_per_device_per_second"] * of_a_token(16)
        assert each["mfu"] == pytest.approx(devices_do / 1e12, rel=1e-6)


def growing(output_dir: Path) -> ds.Trainer:
    """Its checkpoints lie between two records, in the middle of stretches; lengths change in each step."""
    lengths = [4 + 3 * (number % 5) for number in range(12)] if collectives.world_size() == 1 else [16] * 24
    return trainer(output_dir, ComputeBudget(), lengths=lengths, max_steps=10, logging_steps=3, save_steps=2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_sum_is_the_same_however_often_it_is_killed(tmp_path: Path, world_size: int) -> None:
    kills = [FaultPlan(event=Event.STEP_DONE, count=5), FaultPlan(event=Event.STEP_DONE, count=4)]
    assert_resume_equivalent(growing, kills, world_size=world_size, folder=tmp_path)


def test_a_run_that_gets_it_later_counts_what_was_before(tmp_path: Path) -> None:
    trainer(tmp_path, lengths=[8] * 6, max_steps=2, logging_steps=2, save_steps=2).train()
    trainer(tmp_path, ComputeBudget(), lengths=[8] * 6, max_steps=4, logging_steps=2).train()
    assert [each.get("total_petaflops") for each in records(tmp_path)] == [
        None,
        pytest.approx(4 * 8 * of_a_token(8) / 1e15),
    ]


def test_rates_leave_out_a_legs_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes a minute here, where the others take two seconds; one that is all there is counts."""
    now = [0]
    monkeypatch.setattr("dalsegno.state.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def pass_time(ctx: Any) -> None:
        now[0] += 2 if len(passed) else 60
        passed.append(ctx.step)

    passed: list[int] = []
    watch = Listener({"on_microbatch_end": lambda ctx: pass_time(SimpleNamespace(step=ctx.state.global_step))})
    own = [watch, ComputeBudget(peak_hardware_flops=1e6)]
    trainer(tmp_path / "a", *own, lengths=[8] * 6, max_steps=6, logging_steps=3).train()
    assert [each["tokens_per_device_per_second"] for each in records(tmp_path / "a")] == [8 / 2, 8 / 2]
    assert [each["mfu"] for each in records(tmp_path / "a")] == pytest.approx([4 * of_a_token(8) / 1e6] * 2)
    passed.clear()
    trainer(tmp_path / "b", *own, lengths=[8] * 6, max_steps=2, logging_steps=1).train()
    assert [each["tokens_per_device_per_second"] for each in records(tmp_path / "b")] == [8 / 60, 8 / 2]


def test_without_tokens_samples_count(tmp_path: Path) -> None:
    """TinyRegression: two layers, of which the first one's input needs no gradient."""
    small_trainer(tmp_path, JsonLogger(), ComputeBudget(), max_steps=2, logging_steps=1).train()
    of_a_sample = 2 * (2 * 8 * 16 + 3 * 16)
    for step, each in enumerate(records(tmp_path), 1):
        assert each["total_petaflops"] == pytest.approx(step * 4 * of_a_sample / 1e15)
        assert not {"chinchilla_multiple", "tokens_per_device_per_second"} & each.keys()


def test_wrong_arguments() -> None:
    with pytest.raises(ds.ConfigurationError, match="parameters=0; needs an integer of at least 1"):
        ComputeBudget(0)
    with pytest.raises(ds.ConfigurationError, match="tokens_per_parameter=0; needs a finite number over 0"):
        ComputeBudget(tokens_per_parameter=0)
