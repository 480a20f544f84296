"""Micro-batches, their positions in the data, and what loaders of all kinds of data share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from dalsegno.errors import StateMismatch
from dalsegno.stateful.schema import Count, Form, Must


@dataclass(slots=True)
class Microbatch:
    """The data of one forward and backward pass.

    ``samples`` is the number of true samples on this rank: 0 for a padding batch, which has weight zero.
    ``global_samples`` is the number over all ranks; None if only a reduction can determine it.
    """

    batch: Any
    samples: int
    global_samples: int | None

    def pin_memory(self) -> Microbatch:
        """Called by the pinning thread of a loader whose workers return micro-batches."""
        return Microbatch(pin_memory(self.batch), self.samples, self.global_samples)  # type: ignore[no-untyped-call]


class EpochPlace(TypedDict):
    """Position of a loader, counted in batches."""

    one_stream: bool
    epoch: Count
    microbatches: Count
    samples: Count
    exhausted: bool
    own_generators: dict[str, Any]
    spare: NotRequired[Any]
    """This rank's last batch, if it has finished the epoch and other ranks may not have."""


class ImportedPlace(TypedDict):
    """Position in the data of another program, which may have had another order and other batches."""

    kind: Literal["imported"]
    epoch: Count
    fraction: Annotated[float, Must("0 to 1", lambda fraction: 0 <= fraction <= 1)] | None
    """Consumed micro-batches of the epoch, as a fraction of all."""
    microbatches: Count | None
    """Consumed micro-batches of the epoch, on each rank."""


NOT_EXACT = "data_is_not_exact"
"""Key of a log record that warns that a resumed run reads other data than an uninterrupted one."""

IMPORTED = "imported"
"""Kind of a position that another program saved."""

KINDS = {
    IMPORTED: "the data of another program",
    "map": "a map dataset",
    "stateful": "a dataset or loader with its own state_dict",
    "replayed": "a dataset or loader without a state_dict, read again from the start of the epoch",
}


def or_another_kind(own: Form, kind: str) -> Form:
    """Return the schema of a loader's state, or of any other kind's, which :func:`expect_kind` then refuses."""
    others = KINDS.keys() - {kind}
    return own | Annotated[dict[str, Any], Must("a position in some data", lambda state: state["kind"] in others)]


def expect_kind(state: Mapping[str, Any], kind: str) -> None:
    """Raises StateMismatch if ``state`` was saved by another kind of loader."""
    if state["kind"] != kind:
        raise StateMismatch(
            f"the saved position is in {KINDS.get(state['kind'], state['kind'])}, but now the data is "
            f"{KINDS[kind]}; resume with the original data, or start from scratch"
        )


class Counted(NamedTuple):
    """A sample for the collate function, with its contributions to the two counts of its micro-batch."""

    value: Any
    samples: int
    global_samples: int | None
    """None: only a reduction can determine it."""


@dataclass(frozen=True, slots=True)
class CountingCollate:
    """Collates :class:`Counted` samples to a :class:`Microbatch`, to return true counts from a worker process."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, counted: list[Counted]) -> Microbatch:
        batch = self.collate([sample.value for sample in counted])
        of_all = [s.global_samples for s in counted if s.global_samples is not None]
        return Microbatch(batch, sum(s.samples for s in counted), sum(of_all) if len(of_all) == len(counted) else None)


def plain_batch(batch: Any) -> Any:
    """Convert a batch to types that a checkpoint supports, mappings to dicts; None if it contains other types."""
    if isinstance(batch, torch.Tensor | np.ndarray | str | bytes | bool | int | float):
        return batch
    if isinstance(batch, Mapping):
        values = {key: plain_batch(value) for key, value in batch.items()}
        return values if all(value is not None for value in values.values()) else None
    if type(batch) in (list, tuple):
        parts = type(batch)(plain_batch(each) for each in batch)
        return parts if all(each is not None for each in parts) else None
    return None


def length_of(data: Any) -> int | None:
    """Return the length of a dataset or loader; None if it has none, or does not know it."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def sample_count(batch: Any) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor, else its length, else 1."""
    tensor = next(tensors_in(batch), None)
    if tensor is not None:
        return tensor.shape[0] if tensor.dim() else 1
    return len(batch) if isinstance(batch, Sized) else 1


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in a batch or a module's return value, inside nested sequences and mappings too."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (Mapping, Sequence)) and not isinstance(tree, (str, bytes)):
        for each in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors_in(each)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor in a batch to ``device``; containers are rebuilt only if there is something to move."""
    if device.type == "cpu":
        return batch  # loaders yield CPU tensors
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
