"""Where the order of a loader's samples comes from: nowhere but its epoch, a random generator, or nobody knows.

Torch's samplers are known. One of the user's own is tried: what it gives first, twice, by the same random generators.
"""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any, Literal

import numpy as np
import torchdata.stateful_dataloader.sampler as of_torchdata
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from dalsegno.distributed.rng import capture_generators, preserved_generators, seed_generators
from dalsegno.stateful.component import Stateful

from .fingerprint import digest
from .generators import OwnGenerators

Order = Literal["fixed", "drawn", "unknown"]

INDICES = 64
"""How many indices, or batches of them, two passes are compared by."""

_FIXED = {SequentialSampler, DistributedSampler, of_torchdata.StatefulDistributedSampler}
_DRAWN = {RandomSampler, SubsetRandomSampler, WeightedRandomSampler, of_torchdata.RandomSampler}
_BATCHES = {BatchSampler, of_torchdata.BatchSampler}


def order_of(loader: Any) -> Order:
    """``fixed``: it depends on the epoch at most. ``drawn``: on random generators that can be found. Else ``unknown``.

    The generators, and what samplers have in their attributes, are as before afterwards.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return "fixed"
    return _order_of(_sampler(loader))


def keeps_its_order(loader: Any) -> bool:
    """Whether a loader with a state finds the same order again by it: what its sampler draws is in it, or is fixed."""
    if not isinstance(loader, StatefulDataLoader) or isinstance(loader.dataset, IterableDataset):
        return True
    sampler = _sampler(loader)
    if type(sampler) is of_torchdata.BatchSampler:
        sampler = sampler.sampler
    return isinstance(sampler, Stateful | of_torchdata.RandomSampler) or _order_of(sampler) == "fixed"


def _sampler(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _order_of(sampler: Any) -> Order:
    if type(sampler) in _BATCHES:
        return _order_of(sampler.sampler)
    if type(sampler) in _FIXED:
        return "fixed"
    return "drawn" if type(sampler) in _DRAWN else _tried(sampler)


def _tried(sampler: Any) -> Order:
    own = OwnGenerators(sampler=sampler)
    before = own.state_dict()
    try:
        aside = _copied(sampler)
        with preserved_generators():
            passes = []
            for _ in range(2):
                seed_generators(0)
                own.load_state_dict(before)
                untouched = capture_generators()
                passes.append(list(islice(iter(aside), INDICES)))
                was_drawn = digest([untouched, before]) != digest([capture_generators(), own.state_dict()])
    except Exception:  # training is going to say what is wrong with it
        return "fixed"
    finally:
        own.load_state_dict(before)
    if passes[0] != passes[1]:
        return "unknown"
    return "drawn" if was_drawn else "fixed"


def _copied(sampler: Any) -> Any:
    """A copy that may count its passes and shuffle its lists; what it reads from is shared."""
    copied = copy.copy(sampler)
    for name, value in vars(sampler).items():
        if isinstance(value, Sampler):
            setattr(copied, name, _copied(value))
        elif isinstance(value, list | dict | set | np.ndarray):
            setattr(copied, name, copy.copy(value))
    return copied
