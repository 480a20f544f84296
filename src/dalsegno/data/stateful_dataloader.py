"""All of torchdata that is used: its StatefulDataLoader, and the samplers that this loader replaces torch's by.

torchdata's development has slowed down, so no other module imports it.
"""

from __future__ import annotations

from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler, RandomSampler, StatefulDistributedSampler

__all__ = ["BatchSampler", "RandomSampler", "StatefulDataLoader", "StatefulDistributedSampler"]
