"""Callbacks that measure time, by a clock that moves only where a test says so."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

import dalsegno as ds
from dalsegno.callbacks import DurationProfiler, SlowRankDetector
from dalsegno.distributed import collectives
from dalsegno.testing import run_ranks, tiny_regression_data
from support.listeners import Listener
from support.models import Line
from support.small import arguments, small_trainer


class Clock:
    """In the place of ``time.perf_counter``."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def spend(clock: Clock, seconds: float) -> Any:
    def handler(ctx: Any) -> None:
        clock.now += seconds

    return handler


# --- SlowRankDetector: a rank that reads slowly -----------------------------------------------------------------------


class Slow:
    """A loader of one's own: six batches, each of which takes the second rank three times as long."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        data = tiny_regression_data(4)
        self._batch = torch.utils.data.default_collate([data[index] for index in range(4)])

    def __iter__(self) -> Iterator[Any]:
        for _ in range(6):
            self._clock.now += 3.0 if collectives.rank() == 1 else 1.0
            yield self._batch

    def __len__(self) -> int:
        return 6


class SlowStream(IterableDataset[dict[str, Tensor]]):
    """The same as a dataset: 24 samples."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __iter__(self) -> Iterator[Any]:
        for sample in tiny_regression_data(24):
            self._clock.now += 0.375 if collectives.rank() == 1 else 0.125
            yield sample


def train_with_a_slow_disk(output_dir: Path, source: str) -> tuple[list[list[float]], list[str]]:
    """With an evaluation, a record and a save at each step, all of which take both ranks very long."""
    clock = Clock()
    time.perf_counter = clock
    original = collectives.gather_floats

    def gather_together(values: Any, purpose: str) -> list[list[float]]:
        """Whoever comes first to the collective waits for the last."""
        gathered = original(values, purpose)
        clock.now = max(now for (now,) in original([clock.now], "clocks"))
        return gathered

    collectives.gather_floats = gather_together
    runtimes: list[list[float]] = []
    messages: list[str] = []
    watching = logging.Handler()
    watching.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dalsegno").addHandler(watching)
    handlers = {
        "on_evaluate": spend(clock, 100.0),
        "on_before_save": spend(clock, 50.0),
        "on_log": lambda ctx: runtimes.append(ctx.logs["rank_runtime"]) if ctx.kind == "train" else None,
    }
    data: dict[str, Any] = (
        {"train_dataloader": Slow(clock)} if source == "loader" else {"train_dataset": SlowStream(clock)}
    )
    if source == "weighed dataset":
        data["loss_weight"] = lambda batch: 1.0
    args = arguments(
        output_dir, max_steps=6, logging_steps=1, eval_steps=1, save_steps=1, parallel="ddp", disable_tqdm=True
    )
    callbacks = [SlowRankDetector(factor=2.0, patience=2), Listener(handlers)]
    ds.Trainer(Line(), args, eval_dataset=tiny_regression_data(8), callbacks=callbacks, **data).train()
    return runtimes, [text for text in messages if "is slow" in text]


@pytest.mark.parametrize("source", ["loader", "weighed dataset"])
def test_a_rank_with_a_slow_disk_is_named(tmp_path: Path, source: str) -> None:
    """Whatever else happens between two steps, and though the ranks wait for each other before each of them."""
    (runtimes, messages), _ = run_ranks(train_with_a_slow_disk, 2, tmp_path, source)
    assert runtimes[1:]
    assert all(second == pytest.approx(3 * first) and first > 0 for first, second in runtimes)
    assert len(messages) == 1 and messages[0].startswith("rank 1 is slow: 3 s per step")


SLOW_COMPUTE: dict[str, tuple[str, dict[str, Any], list[float], list[str]]] = {
    "in backward": (
        "on_after_backward",
        {"gradient_accumulation_steps": 3, "parallel": "ddp"},
        [2.0, 6.0],  # of two backward passes; all wait in the third
        ["rank 1 is slow: 6 s per step of"],
    ),
    "by little": ("on_before_forward", {"parallel": "ddp"}, [1.0, 3.0], []),
    "in a sharded model": (
        "on_before_forward",
        {"parallel": "fsdp"},
        [0.0, 0.0],
        ["SlowRankDetector: the forward pass of a sharded model waits"],
    ),
}


def compute_slowly(output_dir: Path, case: str) -> tuple[list[list[float]], list[str]]:
    event, settings, _, _ = SLOW_COMPUTE[case]
    clock, runtimes, messages = Clock(), [], []
    time.perf_counter = clock
    watching = logging.Handler()
    watching.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dalsegno").addHandler(watching)
    handlers = {
        event: spend(clock, 3.0 if collectives.rank() == 1 else 1.0),
        "on_optimizer_step": spend(clock, 1.0 if case != "by little" else 100.0),
        "on_log": lambda ctx: runtimes.append(ctx.logs["rank_runtime"]) if ctx.kind == "train" else None,
    }
    args = arguments(output_dir, max_steps=4, logging_steps=1, save_steps=0, disable_tqdm=True, **settings)
    callbacks = [Listener(handlers), SlowRankDetector(factor=2.0, patience=2)]
    ds.Trainer(Line(), args, train_dataset=tiny_regression_data(48), callbacks=callbacks).train()
    return runtimes, [text for text in messages if "slow" in text.lower()]


@pytest.mark.parametrize("case", SLOW_COMPUTE)
def test_a_rank_that_computes_slowly_is_named_if_it_matters(tmp_path: Path, case: str) -> None:
    _, _, seconds, expected = SLOW_COMPUTE[case]
    (runtimes, messages), _ = run_ranks(compute_slowly, 2, tmp_path, case)
    assert runtimes == [pytest.approx(seconds)] * 4
    assert [text.startswith(start) for text, start in zip(messages, expected, strict=True)] == [True] * len(expected)


# --- DurationProfiler -------------------------------------------------------------------------------------------------


class Heavy(ds.Callback):
    """Its state takes long to save, once it is not only rehearsed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_saved = False

    def on_before_save(self, ctx: Any) -> None:
        self._is_saved = True

    def state_dict(self) -> dict[str, int]:
        self._clock.now += 1000.0 if self._is_saved else 0.0
        self._is_saved = False
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


SAVES: dict[str, dict[str, Any]] = {
    "at an epoch's end": {"save_strategy": "epoch", "save_steps": 1},
    "of the best": {"save": ds.OnBest(), "save_steps": 500},
    "by the clock": {"save": ds.Every(seconds=1e-9), "save_steps": 500},
    "by steps": {"save_steps": 2},
}


@pytest.mark.parametrize("when", SAVES)
def test_a_save_is_booked_as_one_whenever_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    records: list[dict[str, float]] = []
    handlers = {
        "on_microbatch_end": spend(clock, 10.0),  # after the profiler's own: in what comes next
        "on_log": lambda ctx: records.append(dict(ctx.logs)) if ctx.kind == "train" else None,
    }
    trainer = small_trainer(
        tmp_path,
        DurationProfiler(),
        Heavy(clock),
        Listener(handlers),
        parts={"eval_dataset": tiny_regression_data(4)},
        length=8,
        max_steps=7,
        logging_steps=1,
        eval_steps=2,
        **SAVES[when],
    )
    trainer.train()
    sums = {name: sum(record[f"{name}_runtime"] for record in records) for name in ("save", "data", "other")}
    assert sums["save"] >= 1000.0
    assert sums["save"] % 1000.0 == 0.0
    assert sums["data"] == sums["other"] == 0.0
