"""What a user changes between two legs."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

import dalsegno as ds
from dalsegno.distributed import collectives
from dalsegno.testing import TinyRegression, tiny_regression_data
from dalsegno.testing.equivalence import Trains
from durability.kinds import Augmented, Pure, Sample

from .parts import LENGTH, Outputs, Regression, is_resumed, squared, trainer
from .scenario import CHANGED, scenario


@scenario(CHANGED)
def changed_learning_rate(output_dir: Path) -> Trains:
    """The learning rate."""
    return trainer(output_dir, learning_rate=0.02 if is_resumed(output_dir) else 0.01)


@scenario(CHANGED)
def changed_batch_size(output_dir: Path) -> Trains:
    """The batch size, to half, with accumulation over two."""
    halves = 2 if is_resumed(output_dir) else 1
    return trainer(output_dir, per_device_train_batch_size=4 // halves, gradient_accumulation_steps=halves)


@scenario(CHANGED)
def changed_shares_of_a_mixture(output_dir: Path) -> Trains:
    """The weights of a `ds.Mixture`."""
    shares = {"a": 1.0, "b": 3.0 if is_resumed(output_dir) else 1.0}
    return trainer(output_dir, train_dataset=ds.Mixture({"a": Pure(LENGTH // 2), "b": Augmented(LENGTH // 2)}, shares))


@scenario(CHANGED)
def grown_dataset(output_dir: Path) -> Trains:
    """The dataset has more samples."""
    return trainer(output_dir, train_dataset=Pure(LENGTH + 4 * is_resumed(output_dir)))


@scenario(CHANGED)
def other_samples(output_dir: Path) -> Trains:
    """The dataset has as many samples, and others."""
    return trainer(output_dir, train_dataset=tiny_regression_data(LENGTH, seed=int(is_resumed(output_dir))))


@scenario(CHANGED)
def changed_preprocessing(output_dir: Path) -> Trains:
    """The code of the collate function."""
    factor = 0.9 if is_resumed(output_dir) else 1.0

    def collate(samples: list[Sample]) -> Sample:
        batch = default_collate(samples)
        return batch | {"x": batch["x"] * factor}

    return trainer(output_dir, data_collator=collate)


@scenario(CHANGED)
def changed_model_code(output_dir: Path) -> Trains:
    """The code of `forward`, with the same parameters."""
    other = is_resumed(output_dir)
    return trainer(output_dir, model=Regression(lambda outputs: torch.tanh(outputs) if other else outputs))


@scenario(CHANGED)
def changed_model_shape(output_dir: Path) -> Trains:
    """The width of a layer."""
    return trainer(output_dir, model=TinyRegression(32 if is_resumed(output_dir) else 16))


@scenario(CHANGED)
def changed_optimizer(output_dir: Path) -> Trains:
    """The optimizer's class."""
    model = TinyRegression()
    kind = torch.optim.SGD if is_resumed(output_dir) else torch.optim.Adam
    return trainer(output_dir, model=model, optimizer=kind(model.parameters(), lr=0.01))


@scenario(CHANGED)
def environment_variable(output_dir: Path) -> Trains:
    """An environment variable that the loss function reads."""
    os.environ["LOSS_SCALE"] = "2.0" if is_resumed(output_dir) else "1.0"
    return trainer(
        output_dir,
        model=Outputs(),
        loss_fn=lambda outputs, batch: squared(outputs, batch) * float(os.environ["LOSS_SCALE"]),
    )


@scenario(CHANGED)
def other_number_of_threads(output_dir: Path) -> Trains:
    """The number of threads, `torch.set_num_threads`."""
    torch.set_num_threads(2 if is_resumed(output_dir) else 1)
    many = torch.randn(400_000)  # enough for a sum by several threads
    return trainer(output_dir, model=Regression(lambda outputs: outputs + (many * outputs.mean()).sum() / 1000))


@scenario(CHANGED, ranks=2)
def other_number_of_ranks(output_dir: Path) -> Trains:
    """The number of ranks, from two to one."""
    if not is_resumed(output_dir):
        return trainer(output_dir, parallel="ddp")
    rank = collectives.rank()
    dist.destroy_process_group()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return Absent() if rank else trainer(output_dir)


class Absent:
    """A rank that is no more."""

    def train(self) -> None:
        return None
