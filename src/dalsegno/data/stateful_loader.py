"""StatefulLoader: resumes a loader by its own state, such as torchdata's StatefulDataLoader."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal, TypeGuard

from torch.utils.data import DataLoader, IterableDataset

from dalsegno.distributed.rng import capture_generators, preserved_generators, restore_generators
from dalsegno.errors import StateMismatch
from dalsegno.stateful.component import Stateful
from dalsegno.stateful.schema import check

from .digests import digest
from .loader import NOT_EXACT, EpochPlace, Microbatch, or_another_kind, plain_batch
from .splitting import RankShard
from .user_loader import END, UserLoader
from .workers import keep_exhausted_workers

log = logging.getLogger(__name__)


class StatefulPlace(EpochPlace):
    kind: Literal["stateful"]
    cut: bool
    stream: str | None
    loader: Any


class StatefulLoader(UserLoader):
    """Micro-batches of a loader with ``state_dict`` and ``load_state_dict``, whose own state is saved.

    The loader must behave like torchdata's: after each batch its state is the position behind that batch; an iterator
    created after ``load_state_dict`` continues there. If that position is the end of an epoch, the iterator may be
    exhausted, or start the next epoch: loaders do either, and both are supported.

    If an epoch is ended early, one more micro-batch of it is read and dropped. So the abandoned iterator has been used,
    even if it was created from a saved state, and the next one starts at the beginning.
    """

    state_schema = or_another_kind(StatefulPlace, "stateful")

    _saved: Any = None  # the loader's saved state, before it is loaded
    _cut = False  # whether the previous epoch was ended early, so that the loader's state is inside it
    _left: Iterator[Any] | None = None  # iterator of the epoch that was ended early
    _loaded_stream: str | None = None  # digest of the dataset's state within the loaded state
    _opened = False
    _first_of_leg: str | None = None  # digest of the first micro-batch after a resume, and of the state behind it
    _resumed_inside = False  # whether this epoch was resumed from a saved state

    def _open(self) -> Iterator[Any]:
        saved, cut, left = self._saved, self._cut, self._left
        self._saved, self._cut, self._left, self._opened = None, False, None, True
        resumed_inside, self._resumed_inside = self._resumed_inside, False
        if saved is None:
            if left is not None:
                self._drop_one(left)
            iterator = super()._open()
            return self._begun(iterator) if resumed_inside and left is None else iterator
        if hasattr(self._loader, "restart_on_stop_iteration"):
            # torchdata.nodes.Loader cannot distinguish a finished epoch from an empty rest; this class can.
            self._loader.restart_on_stop_iteration = False
        if self._microbatches == 0:
            return self._next_epoch_after(saved, cut)
        self._announce_epoch(self.epoch)
        iterator = self._resumed(self._loader, saved)
        self.own_generators.load_state_dict(self._loaded_own)
        self._resumed_inside = True  # possibly behind its last micro-batch
        return self._noting_first(iterator)

    def _next_epoch_after(self, saved: Any, cut: bool) -> Iterator[Any]:
        """Return an iterator over the epoch after the one in which, or at whose end, ``saved`` was taken."""
        loader = self._loader
        self._announce_epoch(self.epoch - 1 if cut else self.epoch)
        iterator = self._resumed(loader, saved)
        self.own_generators.load_state_dict(self._loaded_own)
        if cut:
            self._drop_one(iterator)
        # Each iterator starts new workers, with the dataset as it is in this process, and draws a seed.
        has_workers = getattr(loader, "num_workers", 0) > 0 and not getattr(loader, "persistent_workers", False)
        if cut or self._epoch_listeners() or self._loaded_own or has_workers:
            # Again: the loaded state contains another epoch, and the first iterator drew from the loader's generator.
            self._announce_epoch(self.epoch)
            iterator = iter(loader)
        return iterator if cut else self._begun(iterator)

    def _begun(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Fetch the first micro-batch; if the iterator only contains the previous epoch's end, create a new one."""
        if isinstance(self._loader, DataLoader) and not isinstance(self._loader.dataset, IterableDataset):
            return iterator
        before, own = capture_generators(), self.own_generators.state_dict()
        first = next(iterator, END)
        if first is END:
            restore_generators(before)
            self.own_generators.load_state_dict(own)
            self._check_unchanged()
            self._announce_epoch(self.epoch)
            iterator = iter(self._loader)
            first = next(iterator, END)
            if first is END:
                log.warning("no data is left in epoch %d, in which this leg starts", self.epoch)
            return iter(()) if first is END else chain([first], iterator)
        self._check_begins_anew(first)
        return chain([first], iterator)

    def _noting_first(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Iterate unchanged, but record the first micro-batch after a resume and the dataset's state behind it."""
        first = next(iterator, END)
        if first is END:
            return
        self._first_of_leg = self._signature(first)
        yield first
        while (item := next(iterator, END)) is not END:  # a for loop would restart some iterators
            yield item

    def _signature(self, item: Any) -> str | None:
        stream = self._stream()
        batch = item.batch if isinstance(item, Microbatch) else item
        return None if stream is None else digest([plain_batch(batch), stream.state_dict()])

    def _check_begins_anew(self, first: Any) -> None:
        """Warn if an epoch starts with the leg's first micro-batch, from the middle of the previous epoch."""
        noted, self._first_of_leg = self._first_of_leg, None
        if noted is not None and noted == self._signature(first):
            log.warning(
                "epoch %d starts at the loaded position, in the middle of %s: from here on its data differs from that "
                "of an uninterrupted run; after load_state_dict only the next iterator may start there, each later "
                "one must start at the beginning",
                self.epoch,
                type(self._stream()).__name__,
                extra={NOT_EXACT: True},
            )

    def _check_unchanged(self) -> None:
        """Warn if the stream changed its state when it reached the end of the epoch for the second time."""
        stream = self._stream()
        if stream is not None and self._loaded_stream not in (None, self._digest()):
            log.warning(
                "%s changes its state when an iterator ends, which happens twice in a resumed run: from this epoch on "
                "its data differs from that of an uninterrupted run; change the state when an iterator starts",
                type(stream).__name__,
                extra={NOT_EXACT: True},
            )

    def _stream(self) -> Stateful | None:
        """Return the dataset if it has a state and is iterated in this process."""
        dataset = getattr(self._loader, "dataset", None)
        dataset = dataset.dataset if isinstance(dataset, RankShard) else dataset
        is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        is_here = getattr(self._loader, "num_workers", 0) == 0
        return dataset if is_stream and is_here and _has_state_of_its_own(dataset) else None

    def _drop_one(self, iterator: Iterator[Any]) -> None:
        """Read one more micro-batch of an abandoned epoch, and restore the random generators."""
        own = self.own_generators.state_dict()
        with preserved_generators():
            next(iterator, None)
        self.own_generators.load_state_dict(own)

    @staticmethod
    def _resumed(loader: Any, saved: Any) -> Iterator[Any]:
        _check_counts(saved, "loader")
        try:
            with keep_exhausted_workers(loader, saved):
                loader.load_state_dict(saved)
                return iter(loader)
        except Exception as error:  # torchdata validates by assertions, or not at all
            raise StateMismatch(
                f"the saved state of the {type(loader).__name__} does not fit it: {error!r}; resume with the same "
                f"number of worker processes (now {getattr(loader, 'num_workers', 'unknown')}), or start from scratch"
            ) from error

    def next_epoch(self) -> None:
        self._cut = self._microbatches > 0 and not self._exhausted
        self._left = self._iterator if self._cut else None
        super().next_epoch()

    def close(self) -> None:
        state = self.state_dict()
        super().close()
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        loader: Any = self._loader
        inner, stream = self._saved, self._loaded_stream
        if self._opened and self._saved is None:
            inner, stream = loader.state_dict(), self._digest()
        return {**self._place("stateful"), "cut": self._cut, "stream": stream, "loader": inner}

    def _digest(self) -> str | None:
        stream = self._stream()
        return None if stream is None else digest(stream.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. Raises StateMismatch if it belongs to another kind of data; on iterating, if
        the loader rejects its state."""
        self._set_position(state, "stateful")
        self._cut, self._saved, self._loaded_stream = state["cut"], state["loader"], state["stream"]
        self._left, self._opened, self._resumed_inside, self._first_of_leg = None, False, False, None


def _has_state_of_its_own(dataset: Any) -> TypeGuard[Stateful]:
    """Whether the dataset knows its state. litdata's and MosaicML's do not: the position, which only their loader has,
    is an argument of their ``state_dict``."""
    if not isinstance(dataset, Stateful):
        return False
    needed = [each for each in inspect.signature(dataset.state_dict).parameters.values() if each.default is each.empty]
    return all(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in needed)


_COUNTS = ("_num_yielded", "_sampler_iter_yielded", "samples_yielded", "_num_workers", "_last_yielded_worker_id")
"""Names in the state of torchdata's loader that hold an integer."""
_OF_THE_USER = ("dataset_state", "dataset_iter_state")
"""Names that hold states of the user's own classes."""


def _check_counts(saved: Any, path: str) -> None:
    """Raises StateMismatch if a count of torchdata's is not an integer, which fails only when a batch is read."""
    if not isinstance(saved, dict):
        return
    for name, value in saved.items():
        if name in _COUNTS:
            check(value, int | None, f"{path}.{name}")
        if name not in _OF_THE_USER:
            _check_counts(value, f"{path}.{name}")
