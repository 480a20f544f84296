"""UserLoader: reads any loader and counts the position within an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from dalsegno.distributed import collectives
from dalsegno.distributed.rng import LOADER, mix
from dalsegno.errors import EmptyDataset, StateMismatch
from dalsegno.stateful.component import Scope

from .generators import EpochGenerator, OwnStates
from .loader import Microbatch, expect_kind, length_of, plain_batch, sample_count
from .skipped_data import Gaps, Place
from .torchdata_loaders import StatefulDataLoader
from .workers import ignore_stop_signals

END = object()


class UserLoader:
    """Micro-batches of any iterable of batches, epoch by epoch, from any position on.

    Iterating yields the rest of the current epoch. The loop calls :meth:`next_epoch` at the end of an epoch, early or
    not. The subclasses :class:`StatefulLoader` and :class:`ReplayLoader` save the position: after each micro-batch,
    their ``state_dict()`` is the position behind it, however far worker processes have read ahead.

    Raises EmptyDataset if the loader has length 0.

    Args:
        loader: yields batches, or :class:`Microbatch` objects with their true counts. ``set_epoch`` of the loader, its
            samplers and its dataset, if defined, is called at the start of each epoch.
        seed: for the seeds of worker processes, if the loader has no generator.
        world_size: with 1, this rank's samples are all samples.
        samples: number per epoch, over all ranks, if known.
        lockstep: whether the loaders of all ranks end together and their micro-batches have global counts.
        one_stream: whether all ranks read the same stream in lockstep, so that one rank's position is that of all.
    """

    state_scope: Scope = "per_rank"  # only the loader knows how it splits its data between the ranks

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        seed: int = 0,
        world_size: int = 1,
        samples: int | None = None,
        lockstep: bool = False,
        one_stream: bool = False,
    ) -> None:
        self._loader = loader
        self._seed, self._world_size = seed, world_size
        self._samples_per_epoch = samples
        self.lockstep = lockstep or one_stream or world_size == 1
        """Whether all ranks reach their last micro-batch together, and know the global number of samples of each."""
        self._one_stream = one_stream
        if isinstance(loader, DataLoader):
            ignore_stop_signals(loader)
        # torchdata's always gets one: if its sampler shares the generator, it would restore only the sampler's draws.
        if isinstance(loader, DataLoader) and (loader.generator is None or isinstance(loader, StatefulDataLoader)):
            loader.generator = EpochGenerator()
        if self.length() == 0:
            raise EmptyDataset("the loader has length 0; check its dataset, its batch size and drop_last")
        self.own_generators = OwnStates(**{"": loader})
        self.epoch = 0
        self._microbatches = 0  # consumed in this epoch, on this rank
        self._samples = 0  # consumed in this epoch, over all ranks if known
        self._exhausted = False
        self._iterator: Iterator[Any] | None = None
        self._loaded_own: dict[str, Any] = {}  # states of the data's own generators at the loaded position
        self._lengths: list[int | None] | None = None  # of all ranks' loaders, once exchanged
        self.spare: Microbatch | None = None
        """This epoch's last micro-batch, to be repeated at weight zero while other ranks still have data; None if
        unknown or not needed."""
        self._gaps = Gaps()

    def exchange_lengths(self) -> None:
        """Exchange the lengths of all ranks' loaders, since planning uses the longest. Collective."""
        self._lengths = collectives.gather(self.length(), "the lengths of loaders")

    @property
    def position(self) -> float:
        """Finished epochs, including the fraction of the current one if its length is known."""
        if self._samples_per_epoch:
            return self.epoch + min(1.0, self._samples / self._samples_per_epoch)
        length = self.length()
        return self.epoch + min(1.0, self._microbatches / length) if length else float(self.epoch)

    @property
    def started(self) -> bool:
        """Whether a part of the current epoch was consumed, in this leg or an earlier one."""
        return self._microbatches > 0

    def __iter__(self) -> Iterator[Microbatch]:
        if self._exhausted:
            return
        if self._iterator is None:
            self._iterator = self._open()
        # Not a for loop: some iterators restart when asked for an iterator.
        while (item := next(self._iterator, END)) is not END:
            is_skipped = self._gaps and self._gaps.contains(self.place)
            microbatch = self._count(item)
            if not is_skipped:
                yield microbatch
        self._exhausted, self._iterator = True, None

    def _open(self) -> Iterator[Any]:
        self._announce_epoch(self.epoch)
        return iter(self._loader)

    def _announce_epoch(self, epoch: int) -> None:
        loader = self._loader
        for part in self._epoch_listeners():
            part.set_epoch(epoch)
        generator = getattr(loader, "generator", None)
        if isinstance(generator, EpochGenerator):
            generator.manual_seed(mix(LOADER, self._seed, epoch))

    def _epoch_listeners(self) -> list[Any]:
        parts = [self._loader, *(getattr(self._loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
        return [part for part in parts if callable(getattr(part, "set_epoch", None))]

    def _count(self, item: Any) -> Microbatch:
        if isinstance(item, Microbatch):
            microbatch = item
        else:
            samples = sample_count(item)
            microbatch = Microbatch(item, samples, samples if self._world_size == 1 else None)
        self._microbatches += 1
        self._samples += microbatch.samples if microbatch.global_samples is None else microbatch.global_samples
        if not self.lockstep:
            self.spare = microbatch
        return microbatch

    def next_epoch(self) -> None:
        self.epoch += 1
        self.restart()

    def restart(self) -> None:
        """Move back to the start of the current epoch."""
        self._microbatches = self._samples = 0
        self._exhausted, self._iterator, self.spare = False, None, None

    def skip(self, samples: int) -> int:
        """Skip the next samples of the current epoch, as if they had been consumed: in whole micro-batches, each rank
        its share. Returns the number over all ranks, which is smaller if the epoch ends."""
        passed, rest = 0, iter(self)
        while passed < samples and (microbatch := next(rest, None)) is not None:
            known = microbatch.global_samples
            passed += microbatch.samples * self._world_size if known is None else known
        return passed

    @property
    def place(self) -> Place:
        """What was consumed of the current epoch: samples if all ranks read one stream, since another number of ranks
        makes other micro-batches; else micro-batches."""
        return Place(self.epoch, self._samples if self._one_stream else self._microbatches)

    def place_after(self, microbatches: int) -> Place:
        """This many micro-batches further on; no further than the current epoch's end, if that is known."""
        each = self._samples / max(self._microbatches, 1) if self._one_stream else 1  # so far in this epoch
        return Place(self.epoch, self.place.consumed + math.ceil(microbatches * each))

    def set_gaps(self, gaps: Gaps) -> None:
        """Leave out each micro-batch that begins in a gap: it is read and dropped. To be called before iterating."""
        self._gaps = gaps

    def close(self) -> None:
        """Stop the worker processes, if any. Iterating again starts new ones."""
        self._iterator = None
        if isinstance(self._loader, DataLoader):
            self._loader._iterator = None  # torch keeps persistent workers here

    def length(self) -> int | None:
        """Number of micro-batches of the current epoch on this rank; None if unknown."""
        return length_of(self._loader)

    def microbatches_per_epoch(self) -> int | None:
        """The largest number of any rank; None if unknown."""
        lengths = [self.length()] if self._lengths is None else self._lengths
        known = [length for length in lengths if length is not None]
        return max(known) if len(known) == len(lengths) else None

    def samples_per_epoch(self) -> int | None:
        """The number over all ranks; None if unknown."""
        return self._samples_per_epoch

    def samples_per_microbatch(self) -> int | None:
        """The number in a full micro-batch, over all ranks; None if unknown."""
        batch_size = getattr(self._loader, "batch_size", None)
        return batch_size * self._world_size if isinstance(batch_size, int) else None

    def adapt(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state saved with other data of the same kind, as the same position in this data."""
        return state

    def _place(self, kind: str) -> dict[str, Any]:
        length = self.length()
        is_through = self._exhausted or (length is not None and self._microbatches >= length)  # as far as known
        others_end_here = self._lengths is not None and None not in self._lengths and len({*self._lengths}) == 1
        is_owed = is_through and not others_end_here  # other ranks may not have finished the epoch
        spare = plain_batch(self.spare.batch) if self.spare is not None and is_owed else None
        return {
            **({} if spare is None else {"spare": spare}),
            "kind": kind,
            "one_stream": self._one_stream,
            "epoch": self.epoch,
            "microbatches": self._microbatches,
            "samples": self._samples,
            "exhausted": self._exhausted,
            "own_generators": self.own_generators.state_dict(),
        }

    def _set_position(self, state: dict[str, Any], kind: str) -> None:
        expect_kind(state, kind)
        if state["one_stream"] != self._one_stream:
            ways = ("a part of its own on each rank", "one stream, of which all ranks read the whole")
            raise StateMismatch(
                f"the saved position is in {ways[state['one_stream']]}, now the data is {ways[self._one_stream]}; "
                "resume with the same number of ranks and the same way to split the data, or start from scratch"
            )
        self.epoch, self._exhausted = state["epoch"], state["exhausted"]
        self._microbatches, self._samples = state["microbatches"], state["samples"]
        self._iterator, self._loaded_own = None, state["own_generators"]
        self.spare = Microbatch(state["spare"], 0, None) if "spare" in state else None
        self.own_generators.load_state_dict(self._loaded_own)

    @classmethod
    def reshard(cls, states: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
        """Convert the position to another number of ranks, if all ranks read one stream. Raises StateMismatch for a
        loader that splits its data itself."""
        if not states[0]["one_stream"]:
            raise StateMismatch(
                f"the position in your data was saved by {len(states)} ranks, now there are {world_size}, and only "
                f"your loader or dataset knows how it splits its data; resume with {len(states)} ranks, or pass a map "
                "dataset (one without a state_dict supports any number of ranks)"
            )
        return [states[0]] * world_size
