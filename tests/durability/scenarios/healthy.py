"""Runs whose whole state is in their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dalsegno as ds
from dalsegno.callbacks import EMA
from dalsegno.testing import TinyRegression
from dalsegno.testing.equivalence import Trains
from durability.kinds import Augmented, Counting, Pure, Sample

from .loops import OwnLoop
from .parts import LENGTH, Outputs, squared, trainer
from .scenario import HEALTHY, scenario


@scenario(HEALTHY)
def dropout_and_shuffling(output_dir: Path) -> Trains:
    """A model with dropout, a shuffled dataset."""
    return trainer(output_dir)


@scenario(HEALTHY)
def random_augmentation(output_dir: Path) -> Trains:
    """Samples draw from `random`, `numpy.random` and `torch`."""
    return trainer(output_dir, train_dataset=Augmented(LENGTH))


@scenario(HEALTHY)
def random_augmentation_in_workers(output_dir: Path) -> Trains:
    """The same in two worker processes."""
    return trainer(output_dir, train_dataset=Augmented(LENGTH), dataloader_num_workers=2)


@scenario(HEALTHY)
def dataset_with_a_state(output_dir: Path) -> Trains:
    """A dataset that counts, with a `state_dict`."""
    return trainer(output_dir, train_dataset=Counting(LENGTH))


@scenario(HEALTHY)
def mixture(output_dir: Path) -> Trains:
    """A `ds.Mixture` of two datasets."""
    return trainer(output_dir, train_dataset=ds.Mixture({"a": Pure(LENGTH // 2), "b": Augmented(LENGTH // 2)}))


@scenario(HEALTHY)
def averaged_weights(output_dir: Path) -> Trains:
    """The callback `EMA`."""
    return trainer(output_dir, EMA(decay=0.5))


@scenario(HEALTHY)
def callback_with_a_state(output_dir: Path) -> Trains:
    """A callback that scales gradients by a counter, with `state_dict` and `load_state_dict`."""

    class Decaying(ds.Callback):
        steps = 0

        def on_pre_optimizer_step(self, ctx: Any) -> None:
            self.steps += 1
            for parameter in ctx.model.parameters():
                parameter.grad.div_(self.steps)

        def state_dict(self) -> dict[str, int]:
            return {"steps": self.steps}

        def load_state_dict(self, state: Mapping[str, int]) -> None:
            self.steps = state["steps"]

    return trainer(output_dir, Decaying())


@scenario(HEALTHY)
def loss_function_with_a_buffer(output_dir: Path) -> Trains:
    """The loss function is a module, and counts in a buffer."""

    class Scaled(nn.Module):
        steps: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.ones(()))

        def forward(self, outputs: Tensor, batch: Sample) -> Tensor:
            self.steps += 1
            return squared(outputs, batch) / self.steps

    return trainer(output_dir, model=Outputs(), loss_fn=Scaled())


@scenario(HEALTHY)
def tied_weights(output_dir: Path) -> Trains:
    """Two layers share their weights."""

    class Tied(TinyRegression):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(8, 8), nn.Linear(8, 8)
            self.decode.weight = self.encode.weight

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(self.decode(self.encode(x)), y)

    return trainer(output_dir, model=Tied())


@scenario(HEALTHY)
def column_major_optimizer_state(output_dir: Path) -> Trains:
    """A weight, and so its optimizer state, is stored column by column."""
    model = TinyRegression()
    model.layers[0].weight.data = model.layers[0].weight.data.t().contiguous().t()
    return trainer(output_dir, model=model)


@scenario(HEALTHY)
def warm_up_and_decay(output_dir: Path) -> Trains:
    """A schedule of the learning rate, accumulation and clipping."""
    return trainer(
        output_dir,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        max_grad_norm=0.5,
    )


@scenario(HEALTHY)
def own_loop(output_dir: Path) -> Trains:
    """A loop around `ds.Run`."""
    return OwnLoop(output_dir)


@scenario(HEALTHY, ranks=2)
def two_ranks(output_dir: Path) -> Trains:
    """DDP on two ranks."""
    return trainer(output_dir, parallel="ddp")


@scenario(HEALTHY, ranks=2)
def sharded_over_two_ranks(output_dir: Path) -> Trains:
    """FSDP2 on two ranks."""
    return trainer(output_dir, parallel="fsdp")
