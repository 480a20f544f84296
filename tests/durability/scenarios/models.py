"""State of models, loss functions and hooks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dalsegno.testing import TinyRegression
from dalsegno.testing.equivalence import Trains
from durability.kinds import Sample

from .parts import Outputs, Regression, calling, shrinking, squared, trainer
from .scenario import MODEL, scenario


@scenario(MODEL)
def counter_in_the_loss_function(output_dir: Path) -> Trains:
    """The loss function multiplies by a factor from a global counter."""
    return trainer(
        output_dir, model=Outputs(), loss_fn=lambda outputs, batch: squared(outputs, batch) * (1.0 + shrinking())
    )


@scenario(MODEL)
def label_smoothing_that_decays(output_dir: Path) -> Trains:
    """The loss function smooths labels less with each second of the process."""
    began = time.monotonic()

    def smoothed(outputs: Tensor, batch: Sample) -> Tensor:
        return nn.functional.mse_loss(outputs, batch["y"] * (1.0 - 0.5 ** (1.0 + time.monotonic() - began)))

    return trainer(output_dir, model=Outputs(), loss_fn=smoothed)


@scenario(MODEL)
def counter_in_the_model(output_dir: Path) -> Trains:
    """`forward` counts its calls in an attribute, and scales by it."""

    class Warming(TinyRegression):
        calls = 0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x, y) * min(1.0, self.calls / 20)

    return trainer(output_dir, model=Warming())


@scenario(MODEL)
def list_in_the_model(output_dir: Path) -> Trains:
    """The model keeps its last outputs in a Python list, and subtracts their mean."""
    kept: list[float] = []

    def centred(outputs: Tensor) -> Tensor:
        kept.append(float(outputs.detach().mean()))
        return outputs - sum(kept[-8:]) / len(kept[-8:])

    return trainer(output_dir, model=Regression(centred))


@scenario(MODEL)
def buffer_that_is_not_saved(output_dir: Path) -> Trains:
    """The model updates a buffer with `persistent=False`."""

    class Running(TinyRegression):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()), persistent=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.mean.mul_(0.9).add_(y.mean().detach(), alpha=0.1)
            return super().forward(x, y - self.mean)

    return trainer(output_dir, model=Running())


@scenario(MODEL)
def noise_from_the_models_own_generator(output_dir: Path) -> Trains:
    """The model adds noise from a generator that is its attribute."""
    generator = torch.Generator().manual_seed(4)
    return trainer(output_dir, model=Regression(lambda y: y + torch.randn(y.shape, generator=generator) / 10))


@scenario(MODEL)
def dropout_changed_by_a_callback(output_dir: Path) -> Trains:
    """At step 3 a callback sets another probability of the dropout."""

    def change(ctx: Any) -> None:
        if ctx.state.global_step == 3:
            ctx.model.layers[2].p = 0.5

    return trainer(output_dir, calling(on_step_end=change))


@scenario(MODEL)
def frozen_by_a_callback(output_dir: Path) -> Trains:
    """At step 3 a callback freezes a layer by `requires_grad_(False)`."""

    def freeze(ctx: Any) -> None:
        if ctx.state.global_step == 3:
            ctx.model.layers[0].requires_grad_(False)

    return trainer(output_dir, calling(on_step_end=freeze))


@scenario(MODEL)
def eval_mode_set_by_a_callback(output_dir: Path) -> Trains:
    """At step 3 a callback puts the dropout into eval mode."""

    def evaluate(ctx: Any) -> None:
        if ctx.state.global_step == 3:
            ctx.model.layers[2].eval()

    return trainer(output_dir, calling(on_step_end=evaluate))


@scenario(MODEL)
def forward_hook_with_a_counter(output_dir: Path) -> Trains:
    """A forward hook scales the output of a layer by a counter."""
    model = TinyRegression()
    model.layers[0].register_forward_hook(lambda module, args, output: output * (1.0 + shrinking()))
    return trainer(output_dir, model=model)


@scenario(MODEL)
def gradient_hook_with_a_counter(output_dir: Path) -> Trains:
    """A hook on a parameter scales its gradient by a counter."""
    model = TinyRegression()
    model.layers[0].weight.register_hook(lambda gradient: gradient * (1.0 + shrinking()))
    return trainer(output_dir, model=model)
