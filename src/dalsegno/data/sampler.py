"""ResumableSampler: a batch sampler that can start at any position in constant time.

Its state is two numbers, epoch and cursor. The cursor counts samples of the epoch over all ranks, so resuming from it
works with any world size and batch size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple, TypedDict

import numpy as np
from torch.utils.data import Sampler

from dalsegno.distributed.rng import ORDER, mix
from dalsegno.errors import ConfigurationError, EmptyDataset, StateMismatch
from dalsegno.stateful.schema import Count

from .permutation import Indices, permute
from .skipped_data import EpochGaps, Gaps

log = logging.getLogger(__name__)

BLOCK = 4096
"""Approximate number of indices computed at once: hides NumPy's cost per call, takes 0.5 ms for the first batch."""


class Share(NamedTuple):
    """A rank's share of a global micro-batch, without padding."""

    begin: int
    """Global position in the epoch."""
    end: int
    """Position behind the global micro-batch, and behind a gap that follows."""
    samples: int
    """Number of samples of this rank."""
    global_samples: int
    """Number of samples of all ranks."""


class IndexBatch(list[int]):
    """The indices of one rank's micro-batch and its position; sent to worker processes.

    ``key`` identifies seed and epoch.
    """

    __slots__ = ("key", "share")
    key: int
    share: Share


class SamplerState(TypedDict):
    epoch: Count
    cursor: Count
    length: Count
    seed: int
    shuffle: bool


class ResumableSampler(Sampler[list[int]]):
    """Lists of indices for this rank, from any position of any epoch, in O(1) time and memory.

    A *global micro-batch* is the next ``batch_size * world_size`` samples from the cursor on; each rank takes its
    contiguous share. The remainder in the last one is split evenly (shares differ by at most one sample); a rank with
    an empty share gets one sample as padding, which :meth:`shares` counts as zero.

    Usable as ``batch_sampler=`` of any loader; torchdata's ``StatefulDataLoader`` saves its state by itself. Iteration
    starts at the position set by :meth:`seek` or :meth:`load_state_dict`; when exhausted it moves to the next epoch.

    Args:
        length: samples in the dataset, 1 to 2**63.
        batch_size: samples per rank in one micro-batch.
        rank, world_size: this rank, and the number of ranks.
        seed: with ``shuffle``, the order is a pure function of (seed, epoch).
        shuffle: if False, the order is the dataset's.
        drop_last: drop an incomplete global micro-batch at the end.

    Raises:
        EmptyDataset: if there is no micro-batch.
        ConfigurationError: if an argument is out of range.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ConfigurationError(f"batch_size is {batch_size}; it must be at least 1")
        if not 0 <= rank < world_size:
            raise ConfigurationError(f"rank is {rank} of world_size {world_size}; allowed are 0 to world_size - 1")
        if length > 2**63:
            raise ConfigurationError(f"a dataset of {length} samples; at most 2**63 can be numbered")
        if length == 0:
            raise EmptyDataset("the dataset has length 0; check the path or filter that it was made with")
        if drop_last and length < batch_size * world_size:
            raise EmptyDataset(
                f"{length} samples are fewer than one batch of {batch_size} on each of {world_size} ranks, and "
                "drop_last drops incomplete batches, so nothing remains; use a smaller batch or drop_last=False"
            )
        self.length, self.batch_size = length, batch_size
        self.rank, self.world_size = rank, world_size
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.global_batch = batch_size * world_size
        """Samples in a complete micro-batch, over all ranks."""
        self.samples = length - length % self.global_batch if drop_last else length
        """Samples in an epoch, over all ranks, without those that ``drop_last`` drops."""
        self.epoch, self.cursor = 0, 0
        self._start = 0
        self._gaps, self._epoch_gaps = Gaps(), (-1, EpochGaps(length))

    def set_gaps(self, gaps: Gaps) -> None:
        """Leave out what is in ``gaps``, in iterations that begin from now on. Micro-batches stay full: the samples
        before a gap and those behind it are in one."""
        self._gaps, self._epoch_gaps = gaps, (-1, EpochGaps(self.length))

    def gaps_of(self, epoch: int) -> EpochGaps:
        """Return the gaps of that epoch."""
        if self._epoch_gaps[0] != epoch:
            self._epoch_gaps = epoch, self._gaps.of_epoch(epoch, self.length)
        return self._epoch_gaps[1]

    def __len__(self) -> int:
        """Return the number of micro-batches in a whole epoch."""
        return -(-self.samples // self.global_batch)

    def seek(self, epoch: int, cursor: int) -> None:
        """Start the next iteration at the global sample ``cursor`` of ``epoch``."""
        self.epoch, self.cursor, self._start = epoch, cursor, cursor

    def set_epoch(self, epoch: int) -> None:
        """Start another epoch. Does not move within the current one, so it may be called after a resume."""
        if epoch != self.epoch:
            self.seek(epoch, 0)

    def begin(self, epoch: int, cursor: int) -> int:
        """Return the place of the first sample from ``cursor`` on that is read; the epoch's end if there is none."""
        gaps = self.gaps_of(epoch)
        return self._place_behind(gaps, gaps.rank_of(cursor), cursor)

    def shares(self, epoch: int, cursor: int) -> Iterator[Share]:
        """Yield this rank's share of each micro-batch from ``cursor`` on."""
        gaps, whole = self.gaps_of(epoch), self.global_batch
        rank = gaps.rank_of(cursor)
        while (rows := min((gaps.kept - rank) // whole, max(1, BLOCK // self.batch_size))) > 0:
            ranks = np.uint64(rank) + np.arange(1, rows, dtype=np.uint64) * np.uint64(whole)
            rank += rows * whole
            for end in [*gaps.places(ranks).tolist(), self._place_behind(gaps, rank, cursor)]:
                yield Share(cursor, end, self.batch_size, whole)
                cursor = end
        if rank < gaps.kept and not self.drop_last:
            remaining = gaps.kept - rank
            yield Share(cursor, self._place_behind(gaps, gaps.kept, cursor), self._split(remaining)[1], remaining)

    def _place_behind(self, gaps: EpochGaps, rank: int, cursor: int) -> int:
        """Return the place of the first sample behind ``rank`` samples outside of gaps. If no micro-batch follows, that
        is the epoch's end, or ``cursor`` if that is behind it."""
        is_end = gaps.kept - rank < (self.global_batch if self.drop_last else 1)
        return max(cursor, self.samples) if is_end else gaps.next_place(rank)

    def _split(self, remaining: int) -> tuple[int, int]:
        """Split an incomplete global micro-batch: return (samples before this rank's share, samples in it)."""
        fewest, larger_shares = divmod(remaining, self.world_size)
        return self.rank * fewest + min(self.rank, larger_shares), fewest + (self.rank < larger_shares)

    def __iter__(self) -> Iterator[IndexBatch]:
        self.cursor = self._start
        return self._batches()

    def _batches(self) -> Iterator[IndexBatch]:
        key = mix(self.seed, self.epoch)
        all_indices = chain.from_iterable(self._blocks(key, self.gaps_of(self.epoch)))
        for share, indices in zip(self.shares(self.epoch, self.cursor), all_indices, strict=True):
            batch = IndexBatch(indices)
            batch.key, batch.share = key, share
            self.cursor = share.end
            yield batch
        self.seek(self.epoch + 1, 0)

    def _blocks(self, key: int, gaps: EpochGaps) -> Iterator[list[list[int]]]:
        """Yield the indices of this rank's micro-batches from the cursor on, about :data:`BLOCK` at once."""
        rank = gaps.rank_of(self.cursor)
        while (complete := (gaps.kept - rank) // self.global_batch) > 0:
            rows = min(complete, max(1, BLOCK // self.batch_size))
            yield self._rows(key, gaps, rank, rows)
            rank += rows * self.global_batch
        if rank < gaps.kept and not self.drop_last:
            before, count = self._split(gaps.kept - rank)
            before = before if count else 0  # padding: the global micro-batch's first sample
            positions = np.uint64(rank + before) + np.arange(max(count, 1), dtype=np.uint64)
            yield [self._indices(gaps.places(positions), key).tolist()]

    def _rows(self, key: int, gaps: EpochGaps, rank: int, rows: int) -> list[list[int]]:
        """Return this rank's shares of ``rows`` complete global micro-batches, behind ``rank`` samples outside of
        gaps."""
        first = np.uint64(rank + self.rank * self.batch_size)
        starts: Indices = np.arange(rows, dtype=np.uint64) * np.uint64(self.global_batch) + first
        ranks: Indices = np.add.outer(starts, np.arange(self.batch_size, dtype=np.uint64))
        indices = self._indices(gaps.places(ranks.reshape(-1)), key)
        return indices.reshape(rows, self.batch_size).tolist()

    def _indices(self, positions: Indices, key: int) -> Indices:
        return permute(positions, self.length, mix(ORDER, key)) if self.shuffle else positions

    def state_dict(self) -> SamplerState:
        """Return the position of the current iteration; ``length``, ``seed`` and ``shuffle`` determine its order."""
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def adapt(self, state: Any) -> Any:
        """Convert a position to this dataset: the same number of samples into the epoch, at most to its end.

        A dataset of another length has another order: in this epoch some samples come twice and some not at all.
        """
        return {**state, "cursor": min(state["cursor"], self.samples), "length": self.length}

    def check_state(self, state: SamplerState) -> None:
        """Raises StateMismatch if the position belongs to a dataset of another length, or with another shuffle."""
        if state["length"] != self.length:
            raise StateMismatch(
                f"the saved position is in a dataset of {state['length']} samples, this one has {self.length}; resume "
                "with the original dataset, or start from scratch"
            )
        if state["shuffle"] != self.shuffle:
            raise StateMismatch(
                f"the saved position is in an order with shuffle={state['shuffle']}, now it is {self.shuffle}; samples "
                "would repeat or be missing: resume with the original value, or start from scratch"
            )
        if state["cursor"] > self.length:
            raise StateMismatch(f"the saved position is sample {state['cursor']} of {self.length} in the dataset")

    def load_state_dict(self, state: SamplerState) -> None:
        """Continue at a saved position, in its order: the saved seed replaces this one. Raises StateMismatch, see
        :meth:`check_state`."""
        self.check_state(state)
        if state["seed"] != self.seed:
            log.warning("the data order keeps its saved seed %d, instead of %d", state["seed"], self.seed)
        self.seed = state["seed"]
        self.seek(state["epoch"], state["cursor"])
