"""Callbacks that measure time, by a clock that moves only where a test says so."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import IterableDataset

import dalsegno as ds
from dalsegno.callbacks import (
    ComputeBudget,
    DefaultMetrics,
    DurationProfiler,
    FlopUtilization,
    RateProfiler,
    SlowRankDetector,
)
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


@pytest.mark.parametrize(
    ("every", "evaluated"),
    [
        ({"eval_steps": 3}, [3, 6, 9, 12]),
        ({"eval_strategy": "epoch", "eval_steps": 1}, [3, 6, 9, 12]),
        ({"eval_steps": 3, "eval_on_save": True, "save_steps": 5}, [3, 5, 6, 9, 10, 12]),
        ({"eval_on_save": True, "save_strategy": "epoch", "save_steps": 1}, [3, 6, 9, 12]),
    ],
)
def test_the_time_left_is_what_it_then_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: dict[str, Any], evaluated: list[int]
) -> None:
    """Twelve steps in four epochs; two sets are evaluated behind some of them, the last one among them."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    foreseen: list[tuple[float, float]] = []  # the end of the run, and the share of reading
    handlers = {
        "on_microbatch_begin": spend(clock, 9.0),
        "on_evaluate_begin": spend(clock, 100.0),
        "on_log": lambda ctx: (
            foreseen.append((clock.now + ctx.logs["remaining_runtime"], ctx.logs["data_share"]))
            if ctx.kind == "train"
            else None
        ),
    }

    class Reads(Slow):
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[Any]:
            for _ in range(3):
                clock.now += 1.0
                yield self._batch

    sets = {"one": tiny_regression_data(4), "two": tiny_regression_data(4)}
    parts = {"train_dataset": None, "train_dataloader": Reads(clock), "eval_dataset": sets}
    callbacks = DurationProfiler(), Listener(handlers)
    small_trainer(tmp_path, *callbacks, parts=parts, max_steps=12, logging_steps=1, **every).train()
    assert clock.now == 12 * 10.0 + len(evaluated) * 200.0
    assert [end for end, _ in foreseen] == pytest.approx([120.0] * 3 + [clock.now] * 9)
    shares = [1 / 210 if step in evaluated else 0.1 for step in range(12)]  # since the record before
    assert [share for _, share in foreseen] == pytest.approx(shares)


# --- RateProfiler -----------------------------------------------------------------------------------------------------

LENGTHS = [[7, 3, 5, 1], [2, 2, 8, 4], [6, 1, 1, 1], [8, 8, 3, 2], [1, 5, 4, 4], [3, 3, 6, 8]]
"""Of the texts in each batch."""


class Padded(IterableDataset[dict[str, Tensor]]):
    """Texts filled up to eight tokens."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step, lengths in enumerate(LENGTHS):
            for length in lengths:
                mask = torch.arange(8) < length
                yield {"input_ids": mask * step, "attention_mask": mask.long(), "x": torch.ones(8), "y": torch.ones(1)}


def rates(output_dir: Path, clock: Clock, window: int = 1, leave_at: int = 0) -> list[dict[str, Any]]:
    """Of six steps of ten seconds, the third of which takes 30."""
    records: list[dict[str, Any]] = []

    def leave(ctx: Any) -> None:
        clock.now += 30.0 if ctx.state.global_step == 2 else 10.0
        if ctx.state.global_step + 1 == leave_at:
            raise KeyboardInterrupt

    handlers = {
        "on_pre_optimizer_step": leave,
        "on_log": lambda ctx: records.append(dict(ctx.logs)) if ctx.kind == "train" else None,
    }
    parts = {"train_dataset": Padded()}
    callbacks = RateProfiler(window), Listener(handlers)
    small_trainer(output_dir, *callbacks, parts=parts, max_steps=6, logging_steps=1, save_steps=4).train()
    return records


@pytest.mark.parametrize("window", [1, 3])
def test_rates_over_the_newest_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    seconds = [10.0, 10.0, 30.0, 10.0, 10.0, 10.0]
    for step, record in enumerate(rates(tmp_path, clock, window)):
        covered = slice(max(0, step + 1 - window), step + 1)
        took, texts = sum(seconds[covered]), LENGTHS[covered]
        expected = {
            "samples": 4 * len(texts) / took,
            "tokens": 32 * len(texts) / took,
            "non_padding_tokens": sum(map(sum, texts)) / took,
        }
        assert {name: record[f"{name}_per_second"] for name in expected} == pytest.approx(expected)
        assert {name: record[f"rank_{name}_per_second"] for name in expected} == {
            name: [pytest.approx(each)] for name, each in expected.items()
        }
        assert (record["tokens"], record["non_padding_tokens"]) == (32 * (step + 1), sum(map(sum, LENGTHS[: step + 1])))


def test_tokens_without_padding_are_counted_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    with pytest.raises(KeyboardInterrupt):
        rates(tmp_path, clock, leave_at=6)
    fifth, sixth = rates(tmp_path, clock)
    assert [fifth["non_padding_tokens"], sixth["non_padding_tokens"]] == [
        sum(map(sum, LENGTHS[:end])) for end in (5, 6)
    ]
    assert fifth["non_padding_tokens_per_second"] == sum(LENGTHS[4]) / 10


def rates_of_ranks(output_dir: Path) -> list[dict[str, Any]]:
    time.perf_counter = clock = Clock()
    args = arguments(output_dir, max_steps=2, logging_steps=1, parallel="ddp", per_device_train_batch_size=2)
    records: list[dict[str, Any]] = []
    handlers = {
        "on_pre_optimizer_step": spend(clock, 10.0),
        "on_log": lambda ctx: records.append(dict(ctx.logs)) if ctx.kind == "train" else None,
    }
    data = [*Padded()][:7]  # the last batch of the second rank is short
    ds.Trainer(Line(), args, train_dataset=data, callbacks=[RateProfiler(), Listener(handlers)]).train()
    return records


def test_rates_of_ranks_add_up(tmp_path: Path) -> None:
    one, other = run_ranks(rates_of_ranks, 2, tmp_path)
    assert one == other
    for record in one:
        assert sum(record["rank_non_padding_tokens_per_second"]) == record["non_padding_tokens_per_second"]
    assert one[-1]["non_padding_tokens"] == sum(map(sum, LENGTHS[:2])) - LENGTHS[1][3]
    assert 10 * sum(each["non_padding_tokens_per_second"] for each in one) == one[-1]["non_padding_tokens"]


# --- the counting of FLOPs --------------------------------------------------------------------------------------------


TEXTS = [3, 3, 5, 5]
"""Of the texts of each step."""


class Shown(nn.Module):
    """A forward pass takes a second; of fake tensors, from whose shapes FLOPs are counted, a hundred."""

    clock = Clock()

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        self.clock.now += 100.0 if isinstance(input_ids, FakeTensor) else 1.0
        return self.head(self.embedding(input_ids)).mean()


def train_counting(output_dir: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shown, "clock", Clock())
        patch.setattr(time, "perf_counter", Shown.clock)
        small_trainer(
            output_dir,
            DefaultMetrics(peak_flops_per_device=1e9),
            RateProfiler(),
            DurationProfiler(),
            FlopUtilization(),
            ComputeBudget(),
            Listener({"on_log": lambda ctx: records.append(dict(ctx.logs))}),
            model=Shown(),
            parts={
                "train_dataset": None,
                "train_dataloader": [{"input_ids": torch.ones(2, n).long()} for n in TEXTS],
            },
            max_steps=len(TEXTS),
            logging_steps=1,
            disable_tqdm=True,
        ).train()
    return records


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_counting_of_flops_is_not_timed_as_training(tmp_path: Path, world_size: int) -> None:
    """Whichever record it is counted in: the first one, and the first that has longer texts."""
    for records in run_ranks(train_counting, world_size, tmp_path):
        of_a_token = 2 * 4 + 2 * 2 * 4  # of the head: forward, and both gradients
        for step, (length, record) in enumerate(zip(TEXTS, records, strict=False), 1):
            tokens = world_size * 2 * length
            assert record["tok_per_sec"] == record["tokens_per_second"] == tokens
            assert (record["remaining_runtime"], record["other_runtime"]) == (len(TEXTS) - step, 0)
            assert record["flops_per_second"] == of_a_token * tokens
            assert record["mfu"] == pytest.approx(of_a_token * tokens / (world_size * 1e9))
        assert records[-1]["train_runtime"] == 4.0


def test_who_is_added_in_the_middle_of_a_leg_measures_too(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []

    def add(ctx: Any) -> None:
        if ctx.state.global_step == 1:
            for each in (DefaultMetrics(), DurationProfiler(), RateProfiler()):
                ctx.trainer.add_callback(each)

    handlers = {"on_step_done": add, "on_log": lambda ctx: records.append(dict(ctx.logs))}
    small_trainer(tmp_path, Listener(handlers), max_steps=4, logging_steps=1).train()
    for record in records[2:4]:
        assert min(record[name] for name in ("steps_per_second", "samples_per_second", "forward_runtime")) > 0
