"""ReplayLoader: resumes a loader without state by reading the epoch again up to the saved position."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal, TypedDict

import xxhash
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

from dalsegno.distributed import collectives
from dalsegno.distributed.rng import (
    capture_generators,
    preserved_generators,
    restore_generators,
)
from dalsegno.errors import StateMismatch
from dalsegno.stateful.component import Stateful

from .digests import add_batch
from .generators import EpochGenerators
from .loader import NOT_EXACT, EpochPlace, Microbatch, or_another_kind
from .splitting import RankShard
from .user_loader import END, UserLoader

log = logging.getLogger(__name__)


class ReadContents(TypedDict):
    """What was read of an epoch on this rank; another number of ranks makes it another part."""

    ranks: int
    digest: str


class ReplayedPlace(EpochPlace):
    kind: Literal["replayed"]
    workers: list[int]
    generators: EpochGenerators
    read: ReadContents | None


class ReplayLoader(UserLoader):
    """Micro-batches of a loader without ``state_dict``.

    Its state is the number of micro-batches and the random generators at the start of the epoch: the process's and
    those that loader, samplers, dataset and collate function own. Resuming restores them, reads the loader up to the
    position, and sets the generators back. This is exact for a plain ``DataLoader(shuffle=True)`` and for any other
    data whose order is determined when an iterator is created, or by its own generators. If the order is drawn during
    reading from the process's generators (a shuffle buffer), only the dataset can restore it: give it a ``state_dict``.
    A digest of everything that was read shows whether it was the same again.
    """

    state_schema = or_another_kind(ReplayedPlace, "replayed")

    _at_epoch_begin: Any = None  # the generators at the start of the open epoch
    _saved: Any = None  # the generators for an epoch that is not open yet
    _has_loaded_samplers = False  # whether a sampler of the next iterator has a loaded state
    _loaded_read: ReadContents | None = None  # as saved, up to the loaded position
    _read = xxhash.xxh3_64()  # running digest of the open epoch

    def _open(self) -> Iterator[Any]:
        saved, self._saved = self._saved, None
        if saved is None or self._microbatches == 0:
            self._at_epoch_begin = self._generators()
            return self._begun()
        self._at_epoch_begin = saved
        with preserved_generators():
            restore_generators(saved)
            self.own_generators.load_state_dict(saved["own"])
            iterator = self._begun()
            self._replay(iterator)
        self.own_generators.load_state_dict(self._loaded_own)
        return iterator

    def _begun(self) -> Iterator[Any]:
        """An iterator over the epoch. A sampler whose loaded state is the end of the epoch before may have nothing left
        at first; then it begins anew."""
        is_loaded, self._has_loaded_samplers = self._has_loaded_samplers, False
        if not is_loaded:
            return super()._open()
        before = capture_generators()
        iterator = super()._open()
        first = next(iterator, END)
        if first is not END:
            return chain([first], iterator)
        restore_generators(before)
        return super()._open()

    def _replay(self, iterator: Iterator[Any]) -> None:
        """Read up to the saved position, counted in samples if all ranks read one stream."""
        goal, unit = (self._samples, "samples") if self._one_stream else (self._microbatches, "micro-batches")
        data = getattr(self._loader, "dataset", self._loader)
        name = type(data.dataset if isinstance(data, RankShard) else data).__name__
        log.warning(
            "%s has no state_dict%s: reading %d micro-batches (%d samples) again to find its position",
            name,
            " that restores its order" if isinstance(getattr(data, "dataset", data), Stateful) else "",
            self._microbatches,
            self._samples,
        )
        microbatches, self._microbatches = self._microbatches, 0
        self._samples = done = 0
        began = time.monotonic()
        quiet = True if collectives.rank() else None  # None: shown only on a terminal
        with tqdm(total=goal, desc="reading again", unit=f" {unit}", disable=quiet) as bar:
            while done < goal and (item := next(iterator, END)) is not END:
                self._count(item)
                done = self._samples if self._one_stream else self._microbatches
                bar.update(done - bar.n)
        if done != goal:
            raise StateMismatch(
                f"the saved position is {goal} {unit} into the epoch, and reading again stops at {done}; the data is "
                "shorter now, or the batches (batch_size times ranks) do not divide the position"
            )
        expected = self._loaded_read
        is_comparable = expected is not None and expected["ranks"] == self._world_size
        if self._microbatches == microbatches and is_comparable and expected != self._contents():
            log.warning(
                "%s yields other samples when the epoch is read again, so they differ from those of an uninterrupted "
                "run, from here on too: its order depends on something that is not saved, such as the time, a count of "
                "passes, or numbers that it draws between its batches from generators that the model uses too (a "
                "shuffle buffer); let it depend on its seed and set_epoch(epoch), or on a generator of its own, or "
                "give it a state_dict",
                name,
                extra={NOT_EXACT: True},
            )
        took = time.monotonic() - began
        log.warning("reading again took %.1f s; a dataset or loader with a state_dict would save that", took)

    def _count(self, item: Any) -> Microbatch:
        if not self._microbatches:
            self._read = xxhash.xxh3_64()
        microbatch = super()._count(item)
        add_batch(self._read, microbatch.batch)
        return microbatch

    def _contents(self) -> ReadContents:
        return {"ranks": self._world_size, "digest": self._read.hexdigest()}

    def _generators(self) -> dict[str, Any]:
        return {**capture_generators(), "own": self.own_generators.state_dict()}

    def _worker_layout(self) -> list[int]:
        """Workers and global batch size, which determine the order if several workers read the data; else empty."""
        loader = self._loader
        if isinstance(loader, DataLoader) and loader.num_workers and isinstance(loader.dataset, IterableDataset):
            return [loader.num_workers, (loader.batch_size or 1) * self._world_size]
        return []

    def next_epoch(self) -> None:
        super().next_epoch()
        self._saved = None  # unused on a rank whose epoch had ended at the save

    def close(self) -> None:
        state = self.state_dict()
        super().close()
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._place("replayed"),
            "workers": self._worker_layout(),
            "generators": self._epoch_generators(),
            "read": (self._contents() if self._saved is None else self._loaded_read) if self._microbatches else None,
        }

    def _epoch_generators(self) -> Any:
        """As they were when the epoch began; as they are, between two epochs and where this rank is through."""
        if self._iterator is not None:
            return self._at_epoch_begin
        return self._generators() if self._saved is None or self._exhausted else self._saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. Raises StateMismatch if it belongs to another kind of data, or the worker
        processes of an iterable dataset have changed in number or batch size; on iterating, if the position no longer
        exists."""
        self._set_position(state, "replayed")
        if list(state["workers"]) != self._worker_layout():
            raise StateMismatch(
                "the saved position is one in an iterable dataset read by [workers, global batch] "
                f"{list(state['workers'])}, now it is {self._worker_layout()} (none: []): the order would differ; "
                "resume with the same numbers, or give the dataset a state_dict"
            )
        if self._microbatches == 0:
            self.own_generators.load_state_dict(state["generators"]["own"])
        self._saved, self._loaded_read = state["generators"], state["read"]
        self._has_loaded_samplers = any(name.endswith("sampler") for name in self.own_generators.parts())
