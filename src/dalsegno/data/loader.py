"""Feed: what a training loop reads its micro-batches from, whatever they come out of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, NotRequired, Protocol, TypedDict

import numpy as np
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from dalsegno.errors import StateMismatch
from dalsegno.stateful.component import Scope
from dalsegno.stateful.schema import Count, Form, Must


@dataclass(slots=True)
class Microbatch:
    """One forward/backward's worth of data.

    ``samples`` is how many true samples this rank has in it: 0 where the batch is padding, and weighs nothing.
    ``global_samples`` is the same over all ranks; None where only a reduction can tell.
    """

    batch: Any
    samples: int
    global_samples: int | None

    def pin_memory(self) -> Microbatch:
        """For a loader whose workers hand out micro-batches: its pinning thread calls this."""
        return Microbatch(pin_memory(self.batch), self.samples, self.global_samples)  # type: ignore[no-untyped-call]


class ResumableLoader(Protocol):
    """Micro-batches, epoch by epoch, from any point on.

    Iterating yields the *rest* of the current epoch; after each micro-batch, ``state_dict()`` is the place behind it,
    however far worker processes have read ahead. The loop calls :meth:`next_epoch` when an epoch is over, early or not.
    """

    @property
    def state_scope(self) -> Scope: ...

    @property
    def lockstep(self) -> bool:
        """Whether all ranks come to their last micro-batch together, and know the samples of each over all ranks."""
        ...

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        ...

    @property
    def position(self) -> float:
        """Epochs done, with the current one's fraction; without it where the length is unknown."""
        ...

    @property
    def started(self) -> bool:
        """Whether anything of the current epoch was consumed, in this leg or an earlier one."""
        ...

    @property
    def spare(self) -> Microbatch | None:
        """The newest of this epoch, to be gone through at weight zero while other ranks still have some; None where it
        is not known, or not needed."""
        ...

    def __iter__(self) -> Iterator[Microbatch]: ...

    def next_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        ...

    def restart(self) -> None:
        """Go back to the beginning of the current epoch."""
        ...

    def skip(self, samples: int) -> int:
        """Pass over so many samples of the rest of the current epoch, as if they had been consumed.

        Returns:
            How many that were, over all ranks: fewer where the epoch ends; more where only whole micro-batches can be
            passed over.
        """
        ...

    def close(self) -> None:
        """End the worker processes, if there are any. Iterating afterwards starts new ones."""
        ...

    def length(self) -> int | None:
        """Micro-batches of the current epoch, on this rank; None where it is unknown."""
        ...

    def microbatches_per_epoch(self) -> int | None:
        """On the rank that has the most: the same on all ranks. None where it is unknown."""
        ...

    def samples_per_epoch(self) -> int | None:
        """Over all ranks; None where it is unknown."""
        ...

    def samples_per_microbatch(self) -> int | None:
        """Of a full one, over all ranks; None where a loader does not say."""
        ...

    def adapt(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state that was saved with other data of the same kind, as one of this data: the same place in it."""
        ...

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class EpochPlace(TypedDict):
    """How far a loader has come, counted in batches."""

    one_stream: bool
    epoch: Count
    microbatches: Count
    samples: Count
    exhausted: bool
    own_generators: NotRequired[dict[str, Any]]
    spare: NotRequired[Any]
    """This rank's last batch, where it is through with the epoch and other ranks may not be."""


NOT_EXACT = "data_is_not_exact"
"""True in a log record that says that a resumed run will not read what an uninterrupted one does."""

KINDS = {
    "map": "a map dataset",
    "stateful": "a dataset or loader with a state_dict of its own",
    "replayed": "a dataset or loader without a state_dict, read again from the epoch's beginning",
}


def or_another_kind(own: Form, kind: str) -> Form:
    """The form of a feed's state, or anything that a feed of another kind has written: see :func:`expect_kind`."""
    others = KINDS.keys() - {kind}
    return own | Annotated[dict[str, Any], Must("a place in some data", lambda state: state["kind"] in others)]


def expect_kind(state: Mapping[str, Any], kind: str) -> None:
    """Raise StateMismatch if ``state`` was written by another kind of feed."""
    if state["kind"] != kind:
        raise StateMismatch(
            f"the saved position is one in {KINDS.get(state['kind'], state['kind'])}, but now the data is "
            f"{KINDS[kind]}; resume with the data that the run began with, or start anew"
        )


class Counted(NamedTuple):
    """A sample on its way to the collate function, with what it adds to the two counts of its micro-batch."""

    value: Any
    samples: int
    global_samples: int


@dataclass(frozen=True, slots=True)
class CountingCollate:
    """Makes a :class:`Microbatch` of :class:`Counted` samples, so that true counts come along from a worker process."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, counted: list[Counted]) -> Microbatch:
        batch = self.collate([sample.value for sample in counted])
        return Microbatch(batch, sum(s.samples for s in counted), sum(s.global_samples for s in counted))


def plain_batch(batch: Any) -> Any:
    """The batch as a checkpoint takes it, mappings as dicts; None if it holds anything else."""
    if isinstance(batch, torch.Tensor | np.ndarray | str | bytes | bool | int | float):
        return batch
    if isinstance(batch, Mapping):
        values = {key: plain_batch(value) for key, value in batch.items()}
        return values if all(value is not None for value in values.values()) else None
    if type(batch) in (list, tuple):
        parts = type(batch)(plain_batch(each) for each in batch)
        return parts if all(each is not None for each in parts) else None
    return None


def sample_count(batch: Any) -> int:
    """How many samples a batch holds: the first dimension of the first tensor in it, else its length, else 1."""
    tensor = _first_tensor(batch)
    if tensor is not None:
        return tensor.shape[0] if tensor.dim() else 1
    return len(batch) if isinstance(batch, Sized) else 1


def _first_tensor(tree: Any) -> torch.Tensor | None:
    if isinstance(tree, torch.Tensor):
        return tree
    branches: Sequence[Any] = ()
    if isinstance(tree, Mapping):
        branches = list(tree.values())
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        branches = tree
    return next((found for branch in branches if (found := _first_tensor(branch)) is not None), None)
