"""What cannot be resumed exactly is reported before the first step; what can be is not; checking changes nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

import dalsegno as ds
from dalsegno.data import TrainingData, check_same_length
from dalsegno.data.digests import digest
from dalsegno.data.generators import OwnStates
from dalsegno.errors import ConfigurationError
from dalsegno.testing import TinyRegression, run_ranks, tiny_regression_data
from support.small import arguments


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes longer to start a worker than a run waits for what is only a warning."""
    monkeypatch.setattr("dalsegno.data.fingerprint.PROBE_TIMEOUT_S", 300.0)


class Pairs(Dataset[Any]):
    """tiny_regression_data, changed a little by what ``draw`` gives."""

    def __init__(self, draw: Callable[[], float], length: int = 16) -> None:
        self.data, self.draw, self.length = tiny_regression_data(length), draw, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        sample = self.data[index]
        return {"x": sample["x"] + self.draw(), "y": sample["y"]}


def of_the_system() -> float:
    return int.from_bytes(os.urandom(2)) / 65536


class Late(Pairs):
    """Makes its generator when the first sample is asked for."""

    made: random.Random | None = None

    def __init__(self) -> None:
        super().__init__(self.late)

    def late(self) -> float:
        self.made = self.made or random.Random(0)
        return self.made.random()


def noisy(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate([{**sample, "x": sample["x"] + of_the_system()} for sample in samples])


class InPlace(Sampler[int]):
    """Shuffles the same list again and again."""

    def __init__(self) -> None:
        self.order, self.passes = list(range(16)), 0

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        self.passes += 1
        return iter(self.order)


class Stored(Pairs):
    """Has a state, as the streams of litdata and MosaicML have."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Saving(DataLoader[Any]):
    """Saves the state of its dataset, as the loaders of these libraries do."""

    def state_dict(self) -> dict[str, int]:
        return self.dataset.state_dict()  # type: ignore[attr-defined,no-any-return]

    def load_state_dict(self, state: dict[str, int]) -> None: ...


GLOBAL = random.Random(0)
"""A generator that no object has."""


def from_a_global() -> float:
    return GLOBAL.random()


def in_a_closure() -> Callable[[list[Any]], Any]:
    own = random.Random(0)
    return lambda samples: torch.stack([sample["x"] for sample in samples]) + own.random()


SAID: dict[str, tuple[Callable[[], TrainingData], str]] = {
    "samples": (lambda: TrainingData(Pairs(of_the_system)), "Pairs: a sample, or the batch made of it, changes"),
    "batches": (lambda: TrainingData(Pairs(float), collate_fn=noisy), "Pairs: a sample, or the batch"),
    "a global of a module": (lambda: TrainingData(Pairs(from_a_global)), "Pairs: a sample, or the batch"),
    "a local of a function": (lambda: TrainingData(Pairs(float), collate_fn=in_a_closure()), "Pairs: a sample, or the"),
    "a generator made in a worker": (lambda: TrainingData(Late(), num_workers=2), "changes in a worker process"),
    "persistent workers": (
        lambda: TrainingData.of_loader(DataLoader(Pairs(random.random), num_workers=1, persistent_workers=True)),
        "which outlive an epoch",
    ),
    "workers of a stateful loader": (
        lambda: TrainingData.of_loader(StatefulDataLoader(Pairs(random.random), num_workers=1)),
        "your own loader, which does not save them",
    ),
    "a state that nobody saves": (
        lambda: TrainingData.of_loader(DataLoader(Stored(float))),
        "Stored has a state_dict, which a plain DataLoader does not save",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_it_is_said(name: str) -> None:
    make, words = SAID[name]
    _, [doubt] = make().examine()
    assert words in doubt


class Drawing(Pairs):
    """With a generator of its class."""

    rng = np.random.default_rng(0)

    def __init__(self) -> None:
        super().__init__(float)

    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "noise": self.rng.random()}


def with_noise(samples: list[Any], rngs: dict[str, random.Random]) -> Any:
    return torch.stack([sample["x"] for sample in samples]) + rngs["noise"].random()


FINE: dict[str, Callable[[], TrainingData]] = {
    "generator of the class": lambda: TrainingData(Drawing()),
    "generator in arguments of the collate function": lambda: TrainingData(
        Pairs(float), collate_fn=partial(with_noise, rngs={"noise": random.Random(0)})
    ),
    "a state that the loader saves": lambda: TrainingData.of_loader(Saving(Stored(float))),
    "own generator": lambda: TrainingData(Pairs(random.Random(3).random)),
    "own generator, workers": lambda: TrainingData(Pairs(random.Random(3).random), num_workers=2),
    "a generator made late": lambda: TrainingData(Late()),
    "workers of a plain loader": lambda: TrainingData.of_loader(DataLoader(Pairs(random.random), num_workers=1)),
    "persistent workers that draw nothing": lambda: TrainingData.of_loader(
        DataLoader(Pairs(float), num_workers=1, persistent_workers=True)
    ),
    "batch sampler": lambda: TrainingData.of_loader(
        DataLoader(Pairs(float), batch_sampler=BatchSampler(RandomSampler(range(16)), 4, False))
    ),
}


@pytest.mark.parametrize("name", FINE)
def test_nothing_is_said(name: str) -> None:
    assert FINE[name]().examine()[1] == []


def test_looking_changes_nothing() -> None:
    draws, generator = random.Random(3), torch.Generator().manual_seed(4)
    sampler = InPlace()
    loader = DataLoader(Pairs(draws.random), 4, sampler=sampler, generator=generator)
    before = digest(OwnStates(loader=loader).state_dict())
    TrainingData.of_loader(loader).examine()
    assert digest(OwnStates(loader=loader).state_dict()) == before
    assert (sampler.order, sampler.passes) == (list(range(16)), 0)


def test_the_trainer_says_it_once_before_the_first_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(output_dir: Path, **how: Any) -> str:
        caplog.clear()
        ds.Trainer(TinyRegression(), arguments(output_dir, **how), train_dataset=Pairs(of_the_system)).train()
        return caplog.text

    assert (
        train(tmp_path / "a", max_steps=2, save_steps=1).count(
            "a resumed run will not read what an uninterrupted one does"
        )
        == 1
    )
    assert "resumed run" not in train(tmp_path / "b", max_steps=2), "nothing will be resumed"


# -- ranks that see different data -----------------------------------------------------------------------------------


def error_of_lengths(folder: Path, lengths: list[int], argument: str) -> str:
    rank = torch.distributed.get_rank()
    data = {"train_dataset": tiny_regression_data(40), argument: tiny_regression_data(lengths[rank])}
    with pytest.raises(ConfigurationError) as error:
        ds.Trainer(TinyRegression(), arguments(folder, max_steps=2), **data)
    return str(error.value)


def error_of_content(folder: Path) -> str:
    rank = torch.distributed.get_rank()
    trainer = ds.Trainer(
        TinyRegression(), arguments(folder, max_steps=2), train_dataset=tiny_regression_data(40, seed=rank)
    )
    with pytest.raises(ConfigurationError) as error:
        trainer.train()
    return str(error.value)


@pytest.mark.parametrize("argument", ["train_dataset", "eval_dataset"])
def test_ranks_with_datasets_of_different_lengths(tmp_path: Path, argument: str) -> None:
    first, second = run_ranks(error_of_lengths, 2, tmp_path, [41, 42], argument)
    assert first == second
    assert f"{argument}: the ranks see different datasets: 41 samples on rank 0, 42 samples on rank 1" in first


def test_ranks_with_different_samples(tmp_path: Path) -> None:
    first, second = run_ranks(error_of_content, 2, tmp_path)
    assert first == second
    assert "rank 0 has other samples than rank [1]" in first


def test_alone_any_length_will_do() -> None:
    check_same_length("train_dataset", range(3))
