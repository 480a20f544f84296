"""Determines what the order of a loader's samples depends on: only the epoch, a known random generator, or unknown.

Torch's samplers are known. A custom sampler is probed: its first indices, twice, with the same random generators.
"""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any, Literal

import numpy as np
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

from dalsegno.distributed.rng import capture_generators, preserved_generators, seed_generators
from dalsegno.stateful.component import Stateful, is_stateful

from . import stateful_dataloader as of_torchdata
from .digest import digest
from .generators import OwnGenerators

Order = Literal["fixed", "drawn", "unknown"]

INDICES = 64
"""Number of indices, or batches of them, by which two passes are compared."""

_FIXED = {SequentialSampler, DistributedSampler, of_torchdata.StatefulDistributedSampler}
_DRAWN = {RandomSampler, SubsetRandomSampler, WeightedRandomSampler, of_torchdata.RandomSampler}
_BATCHES = {BatchSampler, of_torchdata.BatchSampler}


def order_of(loader: Any) -> Order:
    """``fixed``: depends at most on the epoch. ``drawn``: depends on known random generators. Else ``unknown``.

    Restores the generators, and the attributes of samplers.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return "fixed"
    sampler = _sampler(loader)
    if is_stateful(sampler) or is_stateful(getattr(sampler, "sampler", None)):
        return "drawn"  # from what is saved with the position
    return _order_of(sampler)


def keeps_its_order(loader: Any) -> bool:
    """Whether the state of a stateful loader restores its order: what its sampler draws is included, or fixed."""
    if not isinstance(loader, of_torchdata.StatefulDataLoader) or isinstance(loader.dataset, IterableDataset):
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
    return "drawn" if type(sampler) in _DRAWN else _probed_order(sampler)


def _probed_order(sampler: Any) -> Order:
    own = OwnGenerators(sampler=sampler)
    before = own.state_dict()
    try:
        copied = _copied(sampler)
        with preserved_generators():
            passes = []
            for _ in range(2):
                seed_generators(0)
                own.load_state_dict(before)
                untouched = capture_generators()
                passes.append(list(islice(iter(copied), INDICES)))
                was_drawn = digest([untouched, before]) != digest([capture_generators(), own.state_dict()])
    except Exception:  # training will raise the same error
        return "fixed"
    finally:
        own.load_state_dict(before)
    if passes[0] != passes[1]:
        return "unknown"
    return "drawn" if was_drawn else "fixed"


def _copied(sampler: Any) -> Any:
    """Copy a sampler so that it may count its passes and shuffle its lists; the data that it reads is shared."""
    copied = copy.copy(sampler)
    for name, value in vars(sampler).items():
        if isinstance(value, Sampler):
            setattr(copied, name, _copied(value))
        elif isinstance(value, list | dict | set | np.ndarray):
            setattr(copied, name, copy.copy(value))
    return copied
