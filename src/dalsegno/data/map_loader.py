"""A map dataset, read from any point at once: the state is a place, and nothing has to be read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NotRequired

import torch
from torch.utils.data import DataLoader

from dalsegno.distributed.rng import LOADER, mix
from dalsegno.stateful.component import Scope

from .loader import Microbatch, expect_kind, or_another_kind
from .sampler import ResumableSampler, SamplerState
from .samples import Samples
from .workers import ignore_stop_signals


class MapState(SamplerState):
    kind: Literal["map"]
    generators: NotRequired[dict[str, Any]]


class MapLoader:
    """Micro-batches of a map dataset; see :class:`Feed`.

    ``loader`` is torch's own, over :class:`Samples`, with ``sampler`` for its batches and a generator of its own, so
    that creating an iterator draws nothing from the global one. The state is the place behind the last micro-batch that
    was handed out, not the place up to which workers have read: world size, batch size, number of workers may change.

    Generators that the dataset or the collate function owns are saved with the place, per rank. In worker processes
    :class:`Samples` seeds them instead.
    """

    state_schema = or_another_kind(MapState, "map")
    lockstep = True
    spare = None

    # torch's DataLoader, since torchdata's StatefulDataLoader would keep, per micro-batch and worker, a second copy
    # of a state that we do not need, and takes it back only with the same number of workers.
    def __init__(self, loader: DataLoader[Any], sampler: ResumableSampler) -> None:
        ignore_stop_signals(loader)
        self._loader = loader
        self._sampler = sampler
        samples = loader.dataset
        assert isinstance(samples, Samples)
        self.own_generators = samples.generators
        self.epoch = 0
        self._cursor = 0

    @property
    def state_scope(self) -> Scope:
        """The place is the same on all ranks; what a generator of one rank's has drawn is not."""
        return "per_rank" if self.own_generators.find() else "replicated"

    @property
    def position(self) -> float:
        return self.epoch + min(1.0, self._cursor / self._sampler.samples)

    @property
    def started(self) -> bool:
        return self._cursor > 0

    def __iter__(self) -> Iterator[Microbatch]:
        generator = self._loader.generator
        assert isinstance(generator, torch.Generator)
        generator.manual_seed(mix(LOADER, self._sampler.seed, self.epoch))
        self._sampler.seek(self.epoch, self._cursor)
        share = self._sampler.share
        for batch in self._batches():
            samples, global_samples = share(self._cursor)
            self._cursor += global_samples
            yield Microbatch(batch, samples, global_samples)

    def _batches(self) -> Iterator[Any]:
        loader, samples = self._loader, self._loader.dataset
        assert isinstance(samples, Samples)
        if loader.num_workers or loader.pin_memory:
            return iter(loader)
        # The same as the loader's own iterator, without its bookkeeping: 25 µs a batch (python -m benchmarks loop).
        collate = loader.collate_fn
        return (collate(samples.fetch(indices)) for indices in self._sampler)

    def next_epoch(self) -> None:
        self.epoch, self._cursor = self.epoch + 1, 0

    def restart(self) -> None:
        self._cursor = 0

    def skip(self, samples: int) -> int:
        """At once, and exactly; with ``drop_last`` in whole micro-batches, as there are no others."""
        whole = self._sampler.global_batch
        wanted = -(-samples // whole) * whole if self._sampler.drop_last else samples
        passed = min(wanted, self._sampler.samples - self._cursor)
        self._cursor += passed
        return passed

    def close(self) -> None:
        self._loader._iterator = None  # where torch keeps persistent workers; others end with their iterator

    def length(self) -> int:
        return len(self._sampler)

    def microbatches_per_epoch(self) -> int:
        return self.length()

    def samples_per_epoch(self) -> int:
        return self._sampler.samples

    def samples_per_microbatch(self) -> int:
        return self._sampler.global_batch

    def adapt(self, state: dict[str, Any]) -> dict[str, Any]:
        expect_kind(state, "map")
        return {**state, **self._sampler.adapt(state)}

    def state_dict(self) -> dict[str, Any]:
        state = {"kind": "map", **self._sampler.state_dict(), "epoch": self.epoch, "cursor": self._cursor}
        generators = self.own_generators.state_dict()
        return {**state, "generators": generators} if generators else state

    def check_state(self, state: Any) -> None:
        """
        Raises:
            StateMismatch: if the place lies in another kind of data, or in a dataset of another length.
        """
        expect_kind(state, "map")
        self._sampler.check_state(state)

    def load_state_dict(self, state: Any) -> None:
        """Go on from a saved place.

        Raises:
            StateMismatch: if it lies in another kind of data, or in a dataset of another length; or if a random
                generator of the data's that was saved is not there any more.
        """
        self.check_state(state)
        self._sampler.load_state_dict(state)
        self.own_generators.load_state_dict(state.get("generators", {}))
        self.epoch, self._cursor = state["epoch"], state["cursor"]

    @classmethod
    def reshard(cls, states: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
        """The same place on any number of ranks; of more ranks, several go on with the generators of one."""
        return [states[rank % len(states)] for rank in range(world_size)]
