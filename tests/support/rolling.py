"""Runs that go back to a checkpoint, because a callback finds a sample that it does not like."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

import dalsegno as ds
from dalsegno.callbacks import EMA, DivergenceDetector, JsonLogger, TBLogger
from dalsegno.data import ResumableSampler
from dalsegno.distributed import collectives
from dalsegno.testing.tiny import DataOrder
from support.models import Deep
from support.ranked import Numbered
from support.small import small_trainer

LENGTH = 40
SAMPLES = 2  # in a step, on all ranks


def samples_of_step(step: int, *, samples: int = SAMPLES) -> list[int]:
    """Numbers of the samples that a run without any rollback takes in a step of its first epoch."""
    order = [number for batch in ResumableSampler(LENGTH, 1, seed=42) for number in batch]
    return order[(step - 1) * samples : step * samples]


class Dropping(Deep):
    """With dropout, which reveals an unrestored random generator."""

    def forward(self, x: Tensor, y: Tensor, number: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.1, self.training), y, number)


class Sniffer(ds.Callback):
    """Asks to go back after each step in which this rank has seen one of these samples."""

    def __init__(self, bad: Collection[int], **how: Any) -> None:
        self._bad, self._how = {*bad}, how
        self._found = False
        self.rollbacks: list[tuple[int, int]] = []
        self.steps: list[int] = []  # each one that has ended
        self.seen: list[list[int]] = []  # samples of each

    def on_step_begin(self, ctx: Any) -> None:
        self._found = False
        self.seen.append([])

    def on_microbatch_begin(self, ctx: Any) -> None:
        numbers = ctx.batch["number"].tolist()
        self.seen[-1] += numbers
        self._found |= not self._bad.isdisjoint(numbers)

    def on_step_end(self, ctx: Any) -> None:
        self.steps.append(ctx.step)
        if self._found:
            ctx.control.roll_back("a bad sample", **self._how)

    def on_rollback(self, ctx: Any) -> None:
        self.rollbacks.append((ctx.from_step, ctx.to_step))


def rolling(output_dir: Path, *callbacks: Any, policy: str = "RecoveryPolicy(margin=3)", **settings: Any) -> ds.Trainer:
    """Two samples a step on all ranks, a checkpoint every four steps."""
    ranks = collectives.world_size()
    parts = {"train_dataset": Numbered(LENGTH), **settings.pop("parts", {})}
    asked = {
        "max_steps": 14,
        "save_steps": 4,
        "logging_steps": 1,
        "per_device_train_batch_size": SAMPLES // ranks,
        "recovery": policy,
        **({"parallel": "ddp"} if ranks > 1 else {}),
    }
    return small_trainer(output_dir, *callbacks, model=Dropping(), parts=parts, **{**asked, **settings})


def observed() -> list[Any]:
    """Callbacks with logs, tensors, averages and an order to be restored."""
    return [JsonLogger(), TBLogger(), EMA(decay=0.9), DivergenceDetector(warmup=2, threshold=1e9), DataOrder()]


def twice_bad(output_dir: Path, **settings: Any) -> ds.Trainer:
    """Goes back from step 10 to 4. Step 5 then has the samples of step 12, and step 6 those of 13: back to 0."""
    policy = "RecoveryPolicy(margin=3, skip=1, lr_factor=0.5, lr_steps=6)"
    sniffer = Sniffer(samples_of_step(10) + samples_of_step(13)[:1])
    return rolling(output_dir, *observed(), sniffer, policy=policy, **settings)


def at_an_epochs_end(output_dir: Path) -> ds.Trainer:
    """Four micro-batches a step, so five steps an epoch. Goes back from the first epoch's end, and from the beginning
    of the second, whose skipped data begins in the first."""
    bad = samples_of_step(20)[:1]
    settings = {"gradient_accumulation_steps": 4, "save_steps": 3, "max_steps": 12, "save_strategy": "steps"}
    return rolling(output_dir, JsonLogger(), DataOrder(), Sniffer(bad), policy="RecoveryPolicy(margin=1)", **settings)


def sharded(output_dir: Path) -> ds.Trainer:
    return rolling(output_dir, JsonLogger(), DataOrder(), Sniffer(samples_of_step(10)), parallel="fsdp")


def own_loader(output_dir: Path) -> ds.Trainer:
    """A plain DataLoader, whose micro-batches are read again up to the place."""
    loader: Any = DataLoader(Numbered(LENGTH), batch_size=SAMPLES, shuffle=True)
    parts = {"train_dataset": None, "train_dataloader": loader}
    return rolling(output_dir, JsonLogger(), DataOrder(), Sniffer([7]), parts=parts)
