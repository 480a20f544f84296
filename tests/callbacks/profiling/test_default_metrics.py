"""DefaultMetrics: tokens a second, and memory."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import dalsegno as ds
from callbacks.scripted import BATCH_SIZE, TOKENS, Kept, logs_of_a_rank, trainer
from callbacks.stage import Stage
from dalsegno.callbacks import DefaultMetrics
from dalsegno.errors import ConfigurationError
from dalsegno.events.contexts import Context, StepEndContext
from dalsegno.testing import run_ranks
from support.listeners import Listener


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What has passed: the sum."""
    passed: list[float] = []
    monkeypatch.setattr("dalsegno.state.time", SimpleNamespace(perf_counter=lambda: sum(passed)))
    return passed


def passing(passed: list[float], *until_records: float) -> Listener:
    """Lets time pass until the first record, and from each one to the next."""
    seconds = iter(until_records)

    def let_pass(ctx: Context) -> None:
        passed.append(next(seconds, 1.0))

    return Listener({"on_train_begin": let_pass, "on_log": lambda ctx: let_pass(ctx) if ctx.kind == "train" else None})


def test_tokens_a_second_since_the_last_record(tmp_path: Path, seconds: list[float]) -> None:
    kept = Kept()
    trainer(tmp_path, [1.0] * 7, kept, passing(seconds, 0.5, 2.0), with_tokens=True, logging_steps=3).train()
    records = kept.of("train")
    tokens = 3 * BATCH_SIZE * TOKENS
    assert {step: logs["tok_per_sec"] for step, logs in records.items()} == {3: tokens / 0.5, 6: tokens / 2}


def test_only_records_of_training_have_it_and_only_what_is_known(tmp_path: Path) -> None:
    kept = Kept()
    trainer(tmp_path, [1.0] * 2, kept, eval_steps=1).train()
    added = {"tok_per_sec", "mfu", "peak_mem"}
    assert {kind: added & logs.keys() for kind, _, logs in kept.records} == {
        "train": {"peak_mem"},
        "eval": set(),
        "final": set(),
    }


def test_peak_memory_is_in_bytes(tmp_path: Path) -> None:
    kept = Kept()
    trainer(tmp_path, [1.0], kept).train()
    assert 50e6 < kept.of("train")[1]["peak_mem"] < 1e12  # torch alone takes more than 50 MB


class Crash(ds.Callback):
    def on_step_end(self, ctx: StepEndContext) -> None:
        if ctx.step == 6:
            raise RuntimeError("crash")


def test_a_leg_counts_the_tokens_of_its_own_time(tmp_path: Path, seconds: list[float]) -> None:
    settings = {"with_tokens": True, "logging_steps": 4, "save_steps": 5}
    with pytest.raises(RuntimeError, match="crash"):
        trainer(tmp_path, [1.0] * 12, Crash(), passing(seconds), **settings).train()
    kept = Kept()
    resumed = trainer(tmp_path, [1.0] * 12, kept, passing(seconds), **settings)
    resumed.train()
    records = kept.of("train")
    assert {step: logs["tokens"] for step, logs in records.items()} == {8: 8 * 12, 12: 12 * 12}
    assert {step: logs["tok_per_sec"] for step, logs in records.items()} == {8: 3 * 12.0, 12: 4 * 12.0}


def test_all_ranks_log_the_same(tmp_path: Path) -> None:
    (first, printed), (second, by_second) = run_ranks(logs_of_a_rank, 2, tmp_path)
    for _, _, logs in (record for record in first if record[0] == "train"):
        assert len(logs["rank_peak_mem"]) == 2 and max(logs["rank_peak_mem"]) == logs["peak_mem"]
    assert [record for record in first if record[0] == "train"] == [record for record in second if record[0] == "train"]
    assert [logs["tokens"] for kind, _, logs in first if kind == "train"] == [2 * 12, 4 * 12, 6 * 12]
    assert by_second == "", "InfoCallback and ProgressCallback print on rank 0 only"
    assert printed.count("output  ") == 1 and printed.count("tok_per_sec\n") == 1
    assert "cpu, 2 ranks, parameters whole on each" in printed
    assert "4 x 2 ranks = 8 samples a step" in printed


def test_an_interval_begins_anew_with_a_rollback_and_is_never_negative(tmp_path: Path, seconds: list[float]) -> None:
    stage = Stage(tmp_path, DefaultMetrics())

    def tokens_per_second(tokens: int) -> float:
        logs = {"tokens": tokens}
        seconds.append(1.0)
        stage.on.log_step.fill(logs, "train")
        stage.on.log_step.fire()
        return logs["tok_per_sec"]

    stage.state.num_input_tokens_seen = 100  # rank 0's own count times two, where the other rank has had shorter texts
    stage.begin()
    assert tokens_per_second(90) == 0
    assert tokens_per_second(150) == 60
    stage.state.num_input_tokens_seen = 110
    stage.on.rollback.fill(15, 10, "a spike")
    stage.on.rollback.fire()
    assert tokens_per_second(130) == 20


@pytest.mark.parametrize("peak", [0, -1.0, float("nan"), float("inf"), "1e12", True])
def test_a_peak_that_cannot_be(peak: object) -> None:
    with pytest.raises(ConfigurationError, match=r"peak_hardware_flops=.*needs a finite number over 0"):
        DefaultMetrics(peak)  # type: ignore[arg-type]


def test_steps_a_second_without_tokens(tmp_path: Path, seconds: list[float]) -> None:
    kept = Kept()
    trainer(tmp_path, [1.0] * 7, kept, passing(seconds, 0.5, 2.0), logging_steps=3).train()
    assert {step: logs["steps_per_second"] for step, logs in kept.of("train").items()} == {3: 6.0, 6: 1.5}
