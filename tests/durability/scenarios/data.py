"""State of datasets, samplers, collate functions and worker processes."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, default_collate

from dalsegno.testing.equivalence import Trains
from durability.kinds import Augmented, Buffered, Counting, Pure, Sample, sample

from .parts import LENGTH, NUMBERS, STEPS, Samples, Stream, calling, is_resumed, loader, trainer
from .scenario import DATA, scenario


@scenario(DATA)
def generator_in_a_closure(output_dir: Path) -> Trains:
    """The collate function is a closure over a NumPy generator."""
    rng = np.random.default_rng(0)

    def collate(samples: list[Sample]) -> Sample:
        batch = default_collate(samples)
        return batch | {"x": batch["x"] + rng.random()}

    return trainer(output_dir, data_collator=collate)


@scenario(DATA)
def generator_of_a_module(output_dir: Path) -> Trains:
    """The dataset draws from a `random.Random` that is a global variable of its module."""
    return trainer(output_dir, train_dataset=Samples(lambda: NUMBERS.random()))


@scenario(DATA)
def generator_as_a_default(output_dir: Path) -> Trains:
    """The dataset calls a function with a `torch.Generator` as the default of an argument."""

    def drawn(generator: torch.Generator = torch.Generator().manual_seed(3)) -> float:  # noqa: B008
        return torch.rand(1, generator=generator).item()

    return trainer(output_dir, train_dataset=Samples(drawn))


@scenario(DATA)
def generator_in_a_generator(output_dir: Path) -> Trains:
    """The dataset draws from a Python generator function, whose variables nobody can read."""

    def numbers() -> Iterator[float]:
        own = random.Random(0)
        while True:
            yield own.random()

    return trainer(output_dir, train_dataset=Samples(numbers().__next__))


@scenario(DATA)
def growing_cache(output_dir: Path) -> Trains:
    """The dataset augments a sample when it is first read, and has it in a cache from then on."""

    class Cached(Pure):
        cache: dict[int, Sample] = {}

        def __getitem__(self, index: int) -> Sample:
            if index not in self.cache:
                self.cache[index] = sample(index, len(self.cache) / 10)
            return self.cache[index]

    return trainer(output_dir, train_dataset=Cached(LENGTH))


@scenario(DATA)
def curriculum_by_counting(output_dir: Path) -> Trains:
    """The dataset makes samples harder the more of them it has returned, by an attribute."""

    class Curriculum(Counting):
        state_dict = None  # type: ignore[assignment]
        load_state_dict = None  # type: ignore[assignment]

    return trainer(output_dir, train_dataset=Curriculum(LENGTH))


@scenario(DATA)
def sampler_that_draws_while_it_is_read(output_dir: Path) -> Trains:
    """The sampler draws each index from the global generator when it is asked for, between the model's own numbers."""

    class Drawing(Sampler[int]):
        def __len__(self) -> int:
            return LENGTH

        def __iter__(self) -> Iterator[int]:
            return (int(torch.randint(LENGTH, ())) for _ in range(LENGTH))

    return trainer(output_dir, train_dataloader=loader(Pure(LENGTH), sampler=Drawing()))


@scenario(DATA)
def shuffle_buffer(output_dir: Path) -> Trains:
    """An iterable dataset has a shuffle buffer without a state, which draws between the samples."""
    return trainer(output_dir, train_dataset=Buffered(LENGTH))


@scenario(DATA)
def persistent_workers(output_dir: Path) -> Trains:
    """A `DataLoader` with `persistent_workers=True` reads an iterable dataset that draws."""
    return trainer(output_dir, train_dataloader=loader(Stream(), num_workers=2, persistent_workers=True))


@scenario(DATA)
def workers_out_of_order(output_dir: Path) -> Trains:
    """A `DataLoader` with `in_order=False` returns batches as soon as a worker process has one."""

    slow = int(is_resumed(output_dir))  # the batch, and so the worker process, for which the disk takes longer

    class Uneven(Pure):
        def __getitem__(self, index: int) -> Sample:
            if index // 4 == slow:
                time.sleep(0.02)
            return sample(index)

    return trainer(output_dir, train_dataloader=loader(Uneven(LENGTH), num_workers=2, in_order=False))


@scenario(DATA)
def workers_seeded_from_entropy(output_dir: Path) -> Trains:
    """A `worker_init_fn` seeds NumPy from the operating system."""

    def seed(worker: int) -> None:
        np.random.seed(int.from_bytes(os.urandom(4)))

    return trainer(output_dir, train_dataloader=loader(Augmented(LENGTH), num_workers=2, worker_init_fn=seed))


@scenario(DATA)
def samples_from_the_clock(output_dir: Path) -> Trains:
    """Samples depend on `time.time()`."""
    return trainer(output_dir, train_dataset=Samples(lambda: time.time() % 1.0))


@scenario(DATA)
def samples_from_the_operating_system(output_dir: Path) -> Trains:
    """Samples depend on `os.urandom`."""
    return trainer(output_dir, train_dataset=Samples(lambda: os.urandom(1)[0] / 256))


@scenario(DATA)
def samples_from_the_process(output_dir: Path) -> Trains:
    """Samples depend on `os.getpid()`, as seeds in many scripts do."""
    return trainer(output_dir, train_dataset=Samples(lambda: os.getpid() % 1000 / 1000))


@scenario(DATA)
def collate_function_with_a_counter(output_dir: Path) -> Trains:
    """The collate function counts its batches in an attribute, and changes them by it."""

    class Collate:
        batches = 0

        def __call__(self, samples: list[Sample]) -> Sample:
            self.batches += 1
            batch = default_collate(samples)
            return batch | {"x": batch["x"] / self.batches}

    return trainer(output_dir, data_collator=Collate())


@scenario(DATA)
def loss_weight_with_a_counter(output_dir: Path) -> Trains:
    """The function `loss_weight=` counts its calls."""
    return trainer(
        output_dir,
        loss_weight=lambda batch: float(next(STEPS)),
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
    )


@scenario(DATA)
def file_that_changes(output_dir: Path) -> Trains:
    """The dataset reads a file at each epoch's begin; the run itself has written it anew meanwhile."""
    file = output_dir.with_suffix(".weights")

    def read(ctx: Any) -> None:
        file.write_text(str(float(file.read_text()) + 1.0 if file.exists() else 0.0))

    return trainer(
        output_dir,
        calling(on_epoch_begin=read),
        train_dataset=Samples(lambda: float(file.read_text()) / 10 if file.exists() else 0.0),
    )
