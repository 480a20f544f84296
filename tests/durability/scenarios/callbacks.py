"""State of callbacks, and random numbers that they draw."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dalsegno as ds
from dalsegno.testing.equivalence import Trains
from durability.kinds import Augmented

from .parts import LENGTH, Regression, calling, is_resumed, trainer
from .scenario import CALLBACKS, LATE, scenario


def draw(ctx: Any) -> None:
    torch.rand(1)


@scenario(CALLBACKS)
def callback_without_state(output_dir: Path) -> Trains:
    """A callback writes an average of the losses into the records, and has no `state_dict`."""
    losses: list[float] = []

    def add(ctx: Any) -> None:
        if ctx.kind == "train":
            losses.append(ctx.logs["loss"])
            ctx.logs["mean_loss"] = sum(losses) / len(losses)

    return trainer(output_dir, calling(on_log_step=add))


@scenario(CALLBACKS)
def draws_at_the_begin_of_a_leg(output_dir: Path) -> Trains:
    """A callback draws from the global generator in `on_train_begin`."""
    return trainer(output_dir, calling(on_train_begin=draw))


@scenario(CALLBACKS)
def draws_after_a_load(output_dir: Path) -> Trains:
    """A callback draws from the global generator in `on_load`."""
    return trainer(output_dir, calling(on_load=draw))


@scenario(CALLBACKS)
def draws_after_a_save(output_dir: Path) -> Trains:
    """A callback draws from the global generator in `on_save`."""
    return trainer(output_dir, calling(on_save=draw))


@scenario(CALLBACKS)
def draws_before_a_save(output_dir: Path) -> Trains:
    """A callback draws from the global generator in `on_before_save`."""
    return trainer(output_dir, calling(on_before_save=draw))


@scenario(CALLBACKS)
def draws_in_its_state_dict(output_dir: Path) -> Trains:
    """A callback draws from the global generator in `state_dict`."""

    class Drawing(ds.Callback):
        def state_dict(self) -> dict[str, float]:
            return {"drawn": torch.rand(1).item()}

        def load_state_dict(self, state: Mapping[str, float]) -> None:
            pass

    return trainer(output_dir, Drawing())


@scenario(CALLBACKS)
def layer_built_at_the_begin(output_dir: Path) -> Trains:
    """A callback builds a layer in `on_train_begin`, which the model then uses."""
    model = Regression()

    def build(ctx: Any) -> None:
        model.change = nn.Linear(1, 1)

    return trainer(output_dir, calling(on_train_begin=build), model=model)


@scenario(CALLBACKS)
def seeds_from_the_clock(output_dir: Path) -> Trains:
    """The script seeds `random` from the clock once everything is built; samples draw from it."""
    built = trainer(output_dir, train_dataset=Augmented(LENGTH))
    random.seed(time.time_ns() if is_resumed(output_dir) else 1)
    return built


@scenario(LATE)
def mean_in_the_final_record(output_dir: Path) -> Trains:
    """A callback collects the losses without a `state_dict`, and writes their mean into the final record only."""
    losses: list[float] = []

    def collect(ctx: Any) -> None:
        losses.append(float(ctx.loss))

    def add(ctx: Any) -> None:
        if ctx.kind == "final":
            ctx.logs["mean_loss"] = sum(losses) / len(losses)

    return trainer(output_dir, calling(on_step_end=collect, on_log_step=add))


@scenario(LATE)
def patience_without_state(output_dir: Path) -> Trains:
    """A callback without a `state_dict` stops the run after fourteen steps of its own count."""
    steps = itertools.count(1)

    def count(ctx: Any) -> None:
        if next(steps) == 14:
            ctx.control.stop("enough")

    return trainer(output_dir, calling(on_step_end=count))
