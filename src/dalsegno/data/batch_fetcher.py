"""Samples: a map dataset for worker processes, which are seeded by the position of their data.

Without it, random numbers in a worker depend on how many batches that worker has made before, which no checkpoint can
contain because workers read ahead.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from dalsegno.distributed.rng import SAMPLE, WORKER, mix, seed_generators

from .generators import OwnStates
from .loader import Counted
from .sampler import IndexBatch


def takes_seed(dataset: Any) -> bool:
    """Whether the dataset's ``__getitem__`` has a parameter named ``seed``."""
    try:
        return "seed" in inspect.signature(type(dataset).__getitem__).parameters
    except (TypeError, ValueError):  # some builtins have no signature; they take no seed either
        return False


class Samples(Dataset[Any]):
    """Fetches whole micro-batches by :class:`IndexBatch`.

    A sample's seed is a pure function of (seed, epoch, index). In a worker process, Python's, NumPy's and torch's
    generators, and those that the dataset and the collate function own, are seeded once per micro-batch from (seed,
    epoch, its global position, rank).
    """

    def __init__(self, dataset: Any, rank: int, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self.dataset, self.rank = dataset, rank
        self.generators = OwnStates(dataset=dataset, collate_fn=collate)
        self._takes_seed = takes_seed(dataset)

    def __getitems__(self, indices: IndexBatch) -> list[Any]:
        if get_worker_info() is not None:
            place = indices.key, indices.share.begin, self.rank
            seed_generators(mix(WORKER, *place))
            self.generators.seed(mix(WORKER, *place, number) for number in itertools.count(1))
        return self.fetch(indices)

    def fetch(self, indices: IndexBatch) -> list[Any]:
        """Return the samples at these indices, with the generators as they are."""
        if self._takes_seed:
            return [self.dataset.__getitem__(i, seed=mix(SAMPLE, indices.key, i)) for i in indices]
        if fetch_all := getattr(self.dataset, "__getitems__", None):
            return list(fetch_all(indices))
        return [self.dataset[index] for index in indices]


class StatefulSamples(Samples):
    """For a dataset with its own state, which is saved with the loader's; its samples are counted."""

    def __getitems__(self, indices: IndexBatch) -> list[Any]:
        values = super().__getitems__(indices)
        everyone = [indices.share.global_samples] + [0] * (len(values) - 1)
        return [
            Counted(value, int(indices.share.samples > 0), more) for value, more in zip(values, everyone, strict=True)
        ]

    def state_dict(self) -> Any:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.dataset.load_state_dict(state)
