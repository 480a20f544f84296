"""Builds the loader that fits the user's dataset or loader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from dalsegno.distributed import collectives
from dalsegno.distributed.rng import capture_generators
from dalsegno.errors import ConfigurationError
from dalsegno.stateful.component import Stateful

from .digests import batch_digest, digest
from .loader import NOT_EXACT, CountingCollate, Microbatch, length_of, to_device
from .map_loader import MapLoader, Samples, StatefulSamples
from .replay_loader import ReplayLoader
from .sampler import ResumableSampler
from .splitting import RankShard, RestartedStream, StatefulRankShard, keeps_its_place, part_of_rank
from .stateful_loader import StatefulLoader
from .torchdata_loaders import StatefulDataLoader, keeps_its_order, restore_orders_of_nodes
from .user_loader import UserLoader

ResumableLoader = MapLoader | StatefulLoader | ReplayLoader
"""A loader of training data, whose position is saved."""

Collate = Callable[[list[Any]], Any]

log = logging.getLogger(__name__)


def train_loader(
    source: Any,
    *,
    batch_size: int,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    shuffle: bool = True,
    drop_last: bool = False,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
) -> ResumableLoader:
    """Build the training data of one rank, resumable at any micro-batch. Collective, if ``source`` splits itself.

    Raises EmptyDataset if there is no micro-batch; ConfigurationError if ``source`` is not a dataset, or an argument is
    out of range.

    Args:
        source: a map dataset (``__len__`` and ``__getitem__``), or an iterable one, which is not shuffled. It splits
            itself, if it can (:mod:`dalsegno.data.splitting`), else each rank takes every ``world_size``-th sample.
            ``__getitem__(self, index, seed=0)`` receives a seed.
        batch_size: samples per rank and micro-batch.
        drop_last: drop the incomplete micro-batch at the end of an epoch; else it is split, with padding if needed.
        persistent_workers: for a map dataset only; an iterable one gets new worker processes for each epoch, so that
            their random numbers depend only on the epoch.
    """
    workers = {"num_workers": num_workers, "pin_memory": pin_memory, "prefetch_factor": prefetch_factor}
    collate = collate_fn or default_collate
    if _is_stream(source):
        part = part_of_rank(source, rank, world_size)
        read, is_split = (source, False) if part is None else (part, True)
        shard, kind = (StatefulRankShard, StatefulLoader) if keeps_its_place(source) else (RankShard, ReplayLoader)
        stream = shard(read, rank, world_size, batch_size, seed, drop_last, is_split=is_split)
        loader = _stream_loader(stream, collate, workers)
        if part is not None:
            resumable = kind(loader, seed=seed, world_size=world_size)
            resumable.exchange_lengths()
            return resumable
        samples = length_of(source)
        if samples is not None and drop_last:
            samples -= samples % (batch_size * world_size)
        return kind(loader, seed=seed, world_size=world_size, samples=samples, one_stream=True)

    sampler = ResumableSampler(_map_length(source), batch_size, rank, world_size, seed, shuffle, drop_last)
    workers["persistent_workers"] = persistent_workers
    if isinstance(source, Stateful):
        stateful = StatefulDataLoader(
            StatefulSamples(source, rank, collate),
            batch_sampler=sampler,
            collate_fn=CountingCollate(collate),
            **workers,
        )
        return StatefulLoader(stateful, seed=seed, world_size=world_size, samples=sampler.samples, lockstep=True)
    return _map_loader(source, sampler, collate, workers)


def resumable_loader(loader: Iterable[Any], *, seed: int = 0, world_size: int = 1) -> ResumableLoader:
    """Wrap the user's own loader of training data. Each rank has its own loader. Collective.

    A loader with ``state_dict`` and ``load_state_dict`` is resumed by its state, if that determines the order of its
    samples; any other is read again up to the position. Raises EmptyDataset if the loader has length 0;
    ConfigurationError if it is not iterable.
    """
    restore_orders_of_nodes(loader)
    kind = StatefulLoader if isinstance(loader, Stateful) and keeps_its_order(loader) else ReplayLoader
    resumable = collectives.run_on_all_ranks(lambda: kind(_iterable(loader), seed=seed, world_size=world_size))
    resumable.exchange_lengths()
    return resumable


class EvalLoader:
    """Yields the same micro-batches in each iteration, from the first to the last; has no state.

    Generators that the data owns start with their first state in each iteration and are restored afterwards, because
    the training data may use the same ones.
    """

    def __init__(self, loader: MapLoader | UserLoader) -> None:
        self._loader = loader
        self._at_first = loader.own_generators.state_dict()
        self._outside: dict[str, Any] = {}
        self._generators = ""  # digest of the process's, as the iteration begins
        self._beginnings: list[str] = []  # digests of different first batches of evaluations
        self.is_evaluated = False
        """Whether an evaluation is running, so that nothing else may read the loader."""

    def __iter__(self) -> Iterator[Microbatch]:
        return iter(self._restarted())

    def _restarted(self) -> MapLoader | UserLoader:
        self._loader.restart()
        self._outside = self._outside or self._loader.own_generators.state_dict()
        self._loader.own_generators.load_state_dict(self._at_first)
        self._generators = digest(capture_generators())
        return self._loader

    @contextmanager
    def evaluated(self) -> Iterator[MapLoader | UserLoader]:
        """Around an evaluation, which may end early: see :attr:`is_evaluated`. Yields the loader to be read."""
        self.is_evaluated = True
        try:
            yield self._restarted()
        finally:
            self.close()
            self.is_evaluated = False

    def check_beginning(self, name: str, batch: Any) -> None:
        """Warn once if an evaluation of the set ``name`` begins with another ``batch`` (None: with none) than the first
        one did, although reading it drew nothing from the process's generators, which are saved."""
        if len(self._beginnings) == 2:  # it was said
            return
        beginning = batch_digest(batch)
        if beginning in self._beginnings or self._generators != digest(capture_generators()):
            return
        self._beginnings.append(beginning)
        if len(self._beginnings) == 2:
            log.warning(
                "the evaluation set %r begins with other samples than in its first evaluation, or none: no checkpoint "
                "contains how far it is, so a resumed run evaluates others than an uninterrupted one. Let an iteration "
                "begin at the start; what is to differ may draw from the process's generators, which are saved",
                name,
                extra={NOT_EXACT: True},
            )

    def close(self) -> None:
        """Stop the worker processes, if any."""
        self._loader.close()
        self._loader.own_generators.load_state_dict(self._outside)
        self._outside = {}

    def length(self) -> int | None:
        """Return the number of micro-batches on this rank; None if unknown."""
        return self._loader.length()


def eval_loader(
    source: Any,
    *,
    batch_size: int,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
) -> EvalLoader:
    """Build the evaluation data of one rank, in order, each sample once over all ranks; see :func:`train_loader`.
    Raises EmptyDataset if there is no sample; ConfigurationError if ``source`` is not a dataset, or an argument is out
    of range."""
    workers = {"num_workers": num_workers, "pin_memory": pin_memory, "prefetch_factor": prefetch_factor}
    collate = collate_fn or default_collate
    if _is_stream(source):
        part = part_of_rank(source, rank, world_size)
        read = source if part is None else part
        rereadable = RestartedStream(read) if isinstance(read, Stateful) else read
        stream = RankShard(rereadable, rank, world_size, batch_size, seed, drop_last=False, is_split=part is not None)
        loader = _stream_loader(stream, collate, workers)
        samples = length_of(source) if part is None else None
        own = UserLoader(loader, seed=seed, world_size=world_size, samples=samples, one_stream=part is None)
        return EvalLoader(own)
    sampler = ResumableSampler(_map_length(source), batch_size, rank, world_size, seed, shuffle=False)
    return EvalLoader(_map_loader(source, sampler, collate, workers))


def resumable_eval_loader(loader: Iterable[Any], *, seed: int = 0, world_size: int = 1) -> EvalLoader:
    """Wrap the user's own loader of evaluation data. Each rank has its own loader."""
    return EvalLoader(UserLoader(_iterable(loader), seed=seed, world_size=world_size))


def _map_loader(source: Any, sampler: ResumableSampler, collate: Collate, workers: dict[str, Any]) -> MapLoader:
    loader: DataLoader[Any] = DataLoader(
        Samples(source, sampler.rank, collate),
        batch_sampler=sampler,
        collate_fn=collate,
        generator=torch.Generator(),
        **workers,
    )
    return MapLoader(loader, sampler)


def _stream_loader(stream: RankShard, collate: Collate, workers: dict[str, Any]) -> DataLoader[Any]:
    kind = StatefulDataLoader if isinstance(stream, StatefulRankShard) else DataLoader
    counting = CountingCollate(collate)
    return kind(stream, batch_size=stream.batch_size, collate_fn=counting, drop_last=stream.drop_last, **workers)


def _is_stream(source: Any) -> bool:
    if isinstance(source, DataLoader):
        raise ConfigurationError(
            f"a {type(source).__name__} is a loader, which already yields batches: pass it as train_dataloader= or "
            "eval_dataloader="
        )
    if isinstance(source, (str, bytes)):
        raise ConfigurationError(f"{source[:80]!r} is a string, not a dataset; pass the dataset that it names")
    if isinstance(source, Mapping) and _lacks_samples(source):
        raise ConfigurationError(
            f"a {type(source).__name__} of {', '.join(map(repr, source))} is not a dataset, since it has no sample 0; "
            "pass one of its values, or, if these are columns, datasets.Dataset.from_dict(…)"
        )
    # torch's IterableDataset inherits a __getitem__ that only raises, so it is checked first.
    if isinstance(source, IterableDataset):
        return True
    if hasattr(source, "__getitem__"):
        return False
    if isinstance(source, Iterable):
        return True
    raise ConfigurationError(
        f"a {type(source).__name__} is not a dataset: it needs __len__ and __getitem__, or __iter__; "
        "pass a loader as train_dataloader= or eval_dataloader="
    )


def _lacks_samples(source: Mapping[Any, Any]) -> bool:
    """Whether no sample 0 is in the mapping, and none is made by a ``__getitem__`` of its class."""
    if type(source).__getitem__ is dict.__getitem__:  # reading might insert a default
        return bool(source) and 0 not in source
    try:
        source[0]
    except Exception as error:
        return isinstance(error, (KeyError, TypeError))
    return False


def _map_length(source: Any) -> int:
    length = length_of(source)
    if length is None:
        raise ConfigurationError(
            f"{type(source).__name__} has __getitem__ but no length; give it __len__, or make it an IterableDataset"
        )
    return length


def _iterable(loader: Any) -> Iterable[Any]:
    if isinstance(loader, (str, bytes)) or not isinstance(loader, Iterable):
        raise ConfigurationError(
            f"a {type(loader).__name__} is not a loader; pass an object that yields batches, such as a DataLoader"
        )
    return loader


class EvalBatches:
    """An evaluation set for callbacks: this rank's batches, from the first on, on the model's device.

    It cannot be read while the set is evaluated, because there is only one position in it.
    """

    def __init__(self, loader: EvalLoader, device: torch.device) -> None:
        self._loader = loader
        self._device = device

    def __len__(self) -> int:
        """Raises TypeError if the length is unknown."""
        count = self._loader.length()
        if count is None:
            raise TypeError("the length of this evaluation set is unknown")
        return count

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        """Raises ConfigurationError while the set is evaluated."""
        if self._loader.is_evaluated:
            raise ConfigurationError(
                "eval_dataloader is being evaluated; read it in on_evaluate, or in any event other than "
                "on_prediction_step and those of the forward pass"
            )
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        try:
            for microbatch in self._loader:
                yield to_device(microbatch.batch, self._device)
        finally:
            if not self._loader.is_evaluated:  # else this iteration was abandoned and an evaluation has started since
                self._loader.close()
