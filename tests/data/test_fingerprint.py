"""A dataset is known again by a few looks at it, which leave no trace."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from dalsegno.data import fingerprint as by_looks
from dalsegno.data.fingerprint import SAMPLES, probe, same
from dalsegno.testing import tiny_regression_data


class Items(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.asked: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.asked.append((os.getpid(), index))
        return self.items[index]


def fingerprint(data: Any, num_workers: int = 0) -> dict[str, Any]:
    return by_looks.fingerprint(data, probe(data, num_workers))


TEXTS = [{"text": f"number {number}", "ids": list(range(number))} for number in range(1000)]


def test_few_samples_are_looked_at() -> None:
    data = Items(TEXTS)
    assert fingerprint(data)["length"] == 1000
    assert {index for _, index in data.asked} == {0, 333, 666, 999}
    assert len({index for _, index in data.asked}) == SAMPLES


def test_in_a_worker_process_where_training_reads_in_one() -> None:
    """A file that a dataset opens at its first sample must not be inherited by worker processes."""
    data = Items(TEXTS)
    there = fingerprint(data, num_workers=2)
    assert data.asked == [], "nothing was read in this process"
    assert there == fingerprint(data)


CHANGES: dict[str, Any] = {
    "a text": {"text": "another", "ids": []},
    "an id": {"text": "number 0", "ids": [1]},
    "a key": {"title": "number 0", "ids": []},
    "a form": {"text": "number 0", "ids": np.zeros((0, 2))},
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_sample_is_another_dataset(name: str) -> None:
    first = fingerprint(Items(TEXTS))
    assert same(first, fingerprint(Items([dict(item) for item in TEXTS])))
    assert not same(first, fingerprint(Items([CHANGES[name], *TEXTS[1:]])))


def test_floats_may_be_rounded_otherwise_elsewhere() -> None:
    images = [torch.randn(3, 8, 8) for _ in range(10)]
    first = fingerprint(Items(images))
    assert same(first, fingerprint(Items([image * (1 + 1e-6) for image in images])))
    assert not same(first, fingerprint(Items([image * 1.1 for image in images])))
    assert not same(first, fingerprint(Items([image + 0.1 for image in images])))
    assert not same(fingerprint(tiny_regression_data(9)), fingerprint(tiny_regression_data(9, seed=1)))


class Augmented(Items):
    """Draws from everybody's generators, or from one of its own."""

    own = random.Random(0)

    def __init__(self, items: list[Any], draw: Any) -> None:
        super().__init__(items)
        self.draw = draw

    def __getitem__(self, index: int) -> Any:
        return self.draw()


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(3)])
def test_random_samples_are_drawn_alike_and_nobody_notices(draw: Any) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index,union-attr]
    data = Augmented(TEXTS, draw)
    assert fingerprint(data) == fingerprint(data) == fingerprint(data, num_workers=1)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index,union-attr]
    assert before == after


def test_samples_that_are_never_the_same_say_nothing() -> None:
    data = Augmented(TEXTS, random.SystemRandom().random)
    first, second = fingerprint(data), fingerprint(data)
    assert first["samples"] is None
    assert same(first, second)
    assert not same(first, fingerprint(Augmented(TEXTS[1:], random.SystemRandom().random)))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        raise AssertionError("it has been read")


class Remembering(Items):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_what_is_not_looked_into() -> None:
    remembering = Remembering(TEXTS)
    for data in (Stream(), remembering, iter(())):
        assert fingerprint(data)["samples"] is None
    assert remembering.asked == []


class Broken(Items):
    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("no disk")


def test_a_dataset_that_cannot_be_read_is_not_our_affair() -> None:
    assert fingerprint(Broken(TEXTS))["samples"] is None


def test_a_dataset_that_knows_itself() -> None:
    """What a Hugging Face dataset calls its fingerprint may be another one each time: then the samples decide."""

    def known(name: str, items: list[Any]) -> dict[str, Any]:
        data = Items(items)
        data._fingerprint = name  # type: ignore[attr-defined]
        return fingerprint(data)

    other = [CHANGES["a text"], *TEXTS[1:]]
    assert same(known("a", TEXTS), known("a", other))
    assert same(known("a", TEXTS), known("b", TEXTS))
    assert not same(known("a", TEXTS), known("b", other))


def test_a_part_of_a_dataset_is_another_one() -> None:
    whole = Items(TEXTS)
    assert not same(fingerprint(Subset(whole, range(500))), fingerprint(Subset(whole, range(500, 1000))))
    objects = Items([np.array(["a", {"b": 1}], dtype=object) for _ in range(3)])
    again = Items([np.array(["a", {"b": 1}], dtype=object) for _ in range(3)])
    assert same(fingerprint(objects), fingerprint(again))


def test_nobody_waits_long_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100, 6))
    monkeypatch.setattr("dalsegno.data.fingerprint.time", SimpleNamespace(monotonic=clock.__next__))
    data = Items(TEXTS)
    assert fingerprint(data)["samples"] is None
    assert len(data.asked) == 2
