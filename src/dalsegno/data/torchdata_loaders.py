"""All of torchdata that is used: its StatefulDataLoader, and what its loaders lack to restore the order of samples.

torchdata's development has slowed down, so no other module imports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler as PlainBatchSampler
from torch.utils.data import DistributedSampler, IterableDataset, SequentialSampler
from torchdata.nodes import BaseNode, IterableWrapper, Loader, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler, RandomSampler, StatefulDistributedSampler

from dalsegno.distributed.rng import capture_generators, preserved_generators, restore_generators
from dalsegno.errors import ConfigurationError, StateMismatch
from dalsegno.stateful.component import Stateful

from .generators import EpochGenerators, OwnStates

__all__ = ["StatefulDataLoader", "keeps_its_order", "restore_orders_of_nodes"]

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


def restore_orders_of_nodes(loader: Any) -> None:
    """Give the sources of a ``torchdata.nodes.Loader`` states that restore their order, and do nothing to any other.

    Raises ConfigurationError for a node without a defined position.
    """
    for node in _nodes(loader.root) if isinstance(loader, Loader) else ():
        if not getattr(node, "in_order", True):
            raise ConfigurationError(
                f"{type(node).__name__}(in_order=False) returns samples in the order in which they become ready, so a "
                "position in it is not defined, and a resumed run would lose some and repeat others; use in_order=True"
            )
        if isinstance(node, SamplerWrapper):
            node.sampler = ResumableOrder.of(node.sampler)
        elif isinstance(node, IterableWrapper) and not isinstance(node.iterable, Stateful):
            node.iterable = ResumableOrder.of(node.iterable)


def _nodes(root: BaseNode[Any]) -> Iterator[BaseNode[Any]]:
    yield root
    for value in vars(root).values():
        for part in value.values() if isinstance(value, Mapping) else (value,):
            if isinstance(part, BaseNode):
                yield from _nodes(part)


class ResumableOrder:
    """A sampler, or another iterable, that can be iterated again from any position of an epoch.

    torchdata's nodes save how many items they have read. The order itself is drawn by each iterator anew, from random
    generators that have moved on by the time of a resume. The state of this class contains the generators as they were
    when the iterator began: the same order is drawn from them again, and read up to the position.

    An iterator is begun in the thread that asks for it, since nodes read ahead in threads, whose draws would come
    between those of the training.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self._own = OwnStates(source=source)
        self._loaded: dict[str, Any] | None = None
        self._began: EpochGenerators | None = None
        self._epoch: int | None = None
        self._read = 0

    @classmethod
    def of(cls, source: Any) -> Any:
        """Wrap ``source``, unless it has a state or a fixed order."""
        is_complete = isinstance(source, Stateful) and not isinstance(source, StatefulDistributedSampler)
        is_fixed = isinstance(source, SequentialSampler | list | tuple | range)
        return source if is_complete or is_fixed else cls(source)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if callable(announce := getattr(self._source, "set_epoch", None)):
            announce(epoch)

    def __iter__(self) -> Iterator[Any]:
        loaded, self._loaded, self._read = self._loaded, None, 0
        if loaded is None or loaded["began"] is None:  # nothing has been read
            self._began = {**capture_generators(), "own": self._own.state_dict()}
            return self._begun()
        if loaded["epoch"] is not None:
            self.set_epoch(loaded["epoch"])
        self._began = began = loaded["began"]
        with preserved_generators():
            restore_generators(began)
            self._own.load_state_dict(began["own"])
            iterator = self._begun()
            for _ in islice(iterator, loaded["read"]):
                pass
            if self._read != loaded["read"]:
                name = type(self._source).__name__
                raise StateMismatch(f"the saved position is {loaded['read']} items into {name}, which ends earlier")
        return iterator

    def _begun(self) -> Iterator[Any]:
        iterator = iter(self._source)
        first = [*islice(iterator, 1)]
        return self._counted(chain(first, iterator))

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self._read += 1
            yield item
        self._read += 1  # that the end was read: torch's RandomSampler draws once more there

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "began": self._began, "read": self._read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state
