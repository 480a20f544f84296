"""What the scenarios are made of: a small trainer, data and models to which each adds something."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, get_worker_info

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.distributed import collectives
from dalsegno.testing import DataOrder, TinyRegression
from durability.kinds import Buffered, Pure, Sample, noise, sample
from support.listeners import Listener
from support.small import small_trainer

LENGTH, EPOCHS = 24, 3
"""Samples in an epoch, four to a step: six steps."""


_PARTS = ("train_dataset", "train_dataloader", "data_collator", "loss_fn", "loss_weight", "optimizer", "lr_scheduler")


def trainer(output_dir: Path, *callbacks: Any, model: nn.Module | None = None, **given: Any) -> ds.Trainer:
    """A small run; ``given``: parts of the Trainer, and settings."""
    parts: dict[str, Any] = {name: given.pop(name) for name in _PARTS if name in given}
    if "train_dataloader" in parts:
        parts["train_dataset"] = None
    usual: dict[str, Any] = {
        "num_train_epochs": EPOCHS,
        "logging_steps": 2,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4 // collectives.world_size(),
        "save_steps": 3,
        "save_in_background": False,
    }
    logs = JsonLogger(), DataOrder()
    return small_trainer(output_dir, *logs, *callbacks, model=model, length=LENGTH, parts=parts, **usual | given)


def is_resumed(output_dir: Path) -> bool:
    """Whether a leg of this run has begun before: what a user edits in a script, or in its surroundings, then."""
    return (output_dir / "run.json").exists()


def loader(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=4, **options)


def calling(name: str = "caller", **handlers: Callable[[Any], Any]) -> ds.Callback:
    """A callback without state: ``calling(on_step_end=…)``."""
    return Listener(handlers, name=name)


class Samples(Pure):
    """Each with a noise that a function gives."""

    def __init__(self, noise: Callable[[], float]) -> None:
        super().__init__(LENGTH)
        self.noise = noise

    def __getitem__(self, index: int) -> Sample:
        return sample(index, self.noise())


class Stream(Buffered):
    """Draws between the samples, in worker processes too."""

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        for index in range(0 if worker is None else worker.id, LENGTH, 1 if worker is None else worker.num_workers):
            yield sample(index, noise())


class Regression(TinyRegression):
    """Its layers' outputs go through ``change`` before the loss."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda outputs: outputs) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.change(self.layers(x)), y)


class Outputs(TinyRegression):
    """Returns outputs, for a loss function."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x)
        return outputs


def squared(outputs: Tensor, batch: Sample) -> Tensor:
    return nn.functional.mse_loss(outputs, batch["y"])


STEPS = itertools.count(1)
"""A global counter of the script's."""
NUMBERS = random.Random(7)
"""A global generator of the script's."""


def shrinking() -> float:
    """A factor that depends on how often it was asked for."""
    return 1.0 / next(STEPS)
