"""All of torchdata that is used: its StatefulDataLoader, and the samplers that this loader replaces torch's by.

torchdata's development has slowed down, so no other module imports it.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler as PlainBatchSampler
from torch.utils.data import DistributedSampler, IterableDataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler, RandomSampler, StatefulDistributedSampler

from dalsegno.stateful.component import Stateful

__all__ = ["StatefulDataLoader", "keeps_its_order"]

_FIXED = (SequentialSampler, DistributedSampler, StatefulDistributedSampler)
"""Samplers without a state whose order depends at most on the epoch; not those derived from them."""


def keeps_its_order(loader: Any) -> bool:
    """Whether the state of a stateful loader restores its order: what its sampler draws is included, or it is fixed."""
    if not isinstance(loader, StatefulDataLoader) or isinstance(loader.dataset, IterableDataset):
        return True
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(sampler) is BatchSampler:  # it saves the state of its sampler
        sampler = sampler.sampler
    if isinstance(sampler, Stateful | RandomSampler):
        return True
    return type(sampler.sampler if type(sampler) is PlainBatchSampler else sampler) in _FIXED
