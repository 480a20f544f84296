"""Which samples come next, on which rank: a batch sampler that can begin anywhere at once.

Its whole state is two numbers, epoch and cursor. The cursor counts samples of the epoch over *all* ranks, so neither
the world size nor the batch size that led to it matters for going on from it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, TypedDict

import numpy as np
from torch.utils.data import Sampler

from dalsegno.distributed.rng import ORDER, mix
from dalsegno.errors import ConfigurationError, EmptyDataset, StateMismatch
from dalsegno.stateful.schema import Count

from .permutation import Indices, permute

log = logging.getLogger(__name__)

BLOCK = 4096
"""Indices are computed about this many at a time: enough to hide NumPy's cost per call, 0.5 ms for the first batch."""


class IndexBatch(list[int]):
    """The indices of one rank's micro-batch, and where it lies; this travels to worker processes.

    ``key`` names seed and epoch, ``cursor`` is the global position of the micro-batch in the epoch; the counts are
    those of :meth:`ResumableSampler.share`.
    """

    __slots__ = ("cursor", "global_samples", "key", "samples")
    key: int
    cursor: int
    samples: int
    global_samples: int


class SamplerState(TypedDict):
    epoch: Count
    cursor: Count
    length: Count
    seed: int
    shuffle: bool


class ResumableSampler(Sampler[list[int]]):
    """Lists of indices for this rank, from any point of any epoch, in O(1) time and memory.

    A *global micro-batch* is the next ``batch_size * world_size`` samples from the cursor on, and each rank takes its
    contiguous share. What remains for the last one is split evenly (shares differ by at most one sample); a rank
    whose share is empty gets one sample as padding, for which :meth:`share` counts zero.

    Usable as ``batch_sampler=`` of any loader; torchdata's ``StatefulDataLoader`` finds its state by itself. Iterating
    begins where :meth:`seek` or :meth:`load_state_dict` pointed; an exhausted iteration leaves it at the next epoch.

    Args:
        length: samples in the dataset, 1 to 2**63.
        batch_size: samples per rank in one micro-batch.
        rank, world_size: which share is ours, of how many.
        seed: with ``shuffle``, the order is a pure function of (seed, epoch).
        shuffle: off, the order is the dataset's own.
        drop_last: leave out an incomplete global micro-batch at the end.

    Raises:
        EmptyDataset: if this gives not a single micro-batch.
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
            raise EmptyDataset("the dataset has length 0; look at the path or filter that it was made with")
        if drop_last and length < batch_size * world_size:
            raise EmptyDataset(
                f"{length} samples are fewer than one batch of {batch_size} on each of {world_size} ranks, and "
                "drop_last leaves out what is incomplete: nothing remains; use a smaller batch or drop_last=False"
            )
        self.length, self.batch_size = length, batch_size
        self.rank, self.world_size = rank, world_size
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.epoch, self.cursor = 0, 0
        self._start = 0

    @property
    def global_batch(self) -> int:
        """Samples in a complete micro-batch, over all ranks."""
        return self.batch_size * self.world_size

    @property
    def samples(self) -> int:
        """Samples in an epoch, over all ranks, without those that ``drop_last`` leaves out."""
        return self.length - self.length % self.global_batch if self.drop_last else self.length

    def __len__(self) -> int:
        """Micro-batches in a whole epoch."""
        return -(-self.samples // self.global_batch)

    def seek(self, epoch: int, cursor: int) -> None:
        """Let the next iteration begin at the global sample ``cursor`` of ``epoch``."""
        self.epoch, self.cursor, self._start = epoch, cursor, cursor

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch. The present one is left where it is, so that this may be called after a resume."""
        if epoch != self.epoch:
            self.seek(epoch, 0)

    def share(self, cursor: int) -> tuple[int, int]:
        """(samples of this rank, samples of all ranks) in the micro-batch at ``cursor``, padding not counted."""
        remaining = self.length - cursor
        if remaining >= self.global_batch:
            return self.batch_size, self.global_batch
        fewest, larger_shares = divmod(remaining, self.world_size)
        return fewest + (self.rank < larger_shares), remaining

    def __iter__(self) -> Iterator[IndexBatch]:
        self.cursor = self._start
        return self._batches()

    def _batches(self) -> Iterator[IndexBatch]:
        key = mix(self.seed, self.epoch)
        while (complete := (self.length - self.cursor) // self.global_batch) > 0:
            rows = min(complete, max(1, BLOCK // self.batch_size))
            for indices in self._rows(key, rows):
                yield self._located(indices, key)
        if self.cursor < self.length and not self.drop_last:
            yield self._located(self._indices(self._last_positions(), key).tolist(), key)
        self.seek(self.epoch + 1, 0)

    def _rows(self, key: int, rows: int) -> list[list[int]]:
        """Our shares of the next ``rows`` complete global micro-batches."""
        first = np.uint64(self.cursor + self.rank * self.batch_size)
        starts: Indices = np.arange(rows, dtype=np.uint64) * np.uint64(self.global_batch) + first
        positions: Indices = np.add.outer(starts, np.arange(self.batch_size, dtype=np.uint64))
        indices = self._indices(positions.reshape(-1), key)
        return indices.reshape(rows, self.batch_size).tolist()

    def _last_positions(self) -> Indices:
        """Our share of the incomplete global micro-batch, or its first sample as padding."""
        count, remaining = self.share(self.cursor)
        fewest, larger_shares = divmod(remaining, self.world_size)
        before = self.rank * fewest + min(self.rank, larger_shares) if count else 0
        return np.uint64(self.cursor + before) + np.arange(max(count, 1), dtype=np.uint64)

    def _indices(self, positions: Indices, key: int) -> Indices:
        return permute(positions, self.length, mix(ORDER, key)) if self.shuffle else positions

    def _located(self, indices: list[int], key: int) -> IndexBatch:
        batch = IndexBatch(indices)
        batch.key, batch.cursor = key, self.cursor
        batch.samples, batch.global_samples = self.share(self.cursor)
        self.cursor += batch.global_samples
        return batch

    def state_dict(self) -> SamplerState:
        """Where the present iteration stands. ``length``, ``seed`` and ``shuffle`` say in which order that is."""
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def adapt(self, state: Any) -> Any:
        """A saved place, as one in this dataset: as many samples into the epoch, or at its end if it is not that long.

        Where the dataset had another length, its order was another one too: some samples come twice in this epoch,
        and some not at all.
        """
        return {**state, "cursor": min(state["cursor"], self.samples), "length": self.length}

    def check_state(self, state: SamplerState) -> None:
        """
        Raises:
            StateMismatch: if the place lies in a dataset of another length, or in a differently shuffled one.
        """
        if state["length"] != self.length:
            raise StateMismatch(
                f"the saved position lies in a dataset of {state['length']} samples, this one has {self.length}; "
                "resume with the dataset that the run began with, or start anew"
            )
        if state["shuffle"] != self.shuffle:
            raise StateMismatch(
                f"the saved position lies in an order with shuffle={state['shuffle']}, now it is {self.shuffle}; "
                "samples would come twice or never: resume with the former value, or start anew"
            )
        if state["cursor"] > self.length:
            raise StateMismatch(f"the saved position is sample {state['cursor']} of {self.length} in the dataset")

    def load_state_dict(self, state: SamplerState) -> None:
        """Go on from a saved place, in its order: the saved seed replaces this one.

        Raises:
            StateMismatch: as :meth:`check_state`.
        """
        self.check_state(state)
        if state["seed"] != self.seed:
            log.warning("the data order goes on with its saved seed %d, not with %d", state["seed"], self.seed)
        self.seed = state["seed"]
        self.seek(state["epoch"], state["cursor"])
