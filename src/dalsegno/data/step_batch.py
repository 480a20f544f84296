"""Draw: the micro-batches of one step, and what each of them counts for, agreed between the ranks.

A step's loss is the mean over its samples on all ranks. So a micro-batch's own mean loss counts with its weight (its
samples, or what ``loss_weight`` says) divided by the weight of the whole step, which every rank must know.

Where the data come from our sampler, that is known without asking. Where they come from elsewhere, or ``loss_weight``
weighs them, the ranks tell each other in one small collective per step; a rank that has run out then goes through the
motions with its last batch, at weight zero, until all have: otherwise the others would wait for it for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch

from dalsegno.distributed import collectives
from dalsegno.errors import EmptyDataset, StateMismatch

from . import Microbatch

LossWeight = Callable[[Any], float]
"""What a batch's mean loss counts for, such as its number of tokens."""


class Source(Protocol):
    """A feed, of training or of evaluation."""

    @property
    def lockstep(self) -> bool: ...

    @property
    def position(self) -> float: ...

    @property
    def started(self) -> bool: ...

    @property
    def spare(self) -> Microbatch | None: ...

    def length(self) -> int | None:
        """Micro-batches of the epoch on this rank; None where it is unknown."""
        ...

    def __iter__(self) -> Iterator[Microbatch]: ...


@dataclass(slots=True)
class StepBatch:
    """One step's micro-batches on this rank."""

    microbatches: list[Microbatch]
    weights: list[float]
    """Of each micro-batch's mean loss."""
    total: float
    """The sum of all weights on all ranks."""
    samples: int
    """On all ranks."""
    tokens: int
    """On this rank."""
    seconds: float
    """How long this rank has read them, alone."""
    place: float
    """Behind it, in epochs; the same on all ranks, where each has a loader of its own that of the longest one."""

    def share(self, index: int) -> float:
        """The part of the step's loss that this micro-batch makes up; all of them, on all ranks, sum to 1."""
        return self.weights[index] / self.total if self.total else 0.0


def iter_steps(feed: Source, size: int, loss_weight: LossWeight | None = None) -> Iterator[StepBatch]:
    """The rest of the feed's epoch in steps of ``size`` micro-batches; what is left at the end is a smaller one.

    Raises:
        EmptyDataset: if one rank has no batch at all while another has.
    """
    source = iter(feed)
    alone = collectives.world_size() == 1
    known = feed.lockstep and loss_weight is None
    while True:
        began = time.perf_counter()
        held = list(islice(source, size))
        seconds = time.perf_counter() - began
        if alone or known:
            if not held:
                return
            yield _weigh(held, loss_weight, seconds, feed.position)
        else:
            draw = _weigh_together(held, loss_weight, seconds, feed)
            if draw is None:
                return
            yield draw


def _weigh(held: list[Microbatch], loss_weight: LossWeight | None, seconds: float, place: float) -> StepBatch:
    weights, samples, tokens = [], 0, 0
    for microbatch in held:
        weights.append(_weight(microbatch, loss_weight))
        samples += microbatch.samples if microbatch.global_samples is None else microbatch.global_samples
        tokens += _tokens(microbatch)
    total = float(samples) if loss_weight is None else sum(weights)
    return StepBatch(held, weights, total, samples, tokens, seconds, place)


def _weigh_together(
    held: list[Microbatch], loss_weight: LossWeight | None, seconds: float, feed: Source
) -> StepBatch | None:
    weights = [_weight(microbatch, loss_weight) for microbatch in held]
    samples = sum(microbatch.samples for microbatch in held)
    told = collectives.gather_floats(
        [sum(weights), samples, len(held), bool(held) or feed.spare is not None, feed.started, *_told(feed)],
        "a step's samples",
    )
    length = int(max(row[2] for row in told))
    if length == 0:
        return None
    if not all(row[3] for row in told):
        empty = [rank for rank, row in enumerate(told) if not row[3]]
        if any(told[rank][4] for rank in empty):
            raise StateMismatch(
                f"rank {empty} is through with the epoch in which the checkpoint was saved, other ranks are not, and "
                "the batch that it repeats until they are is not in the checkpoint (its kind cannot be saved, or "
                "dalsegno was older); resume from another checkpoint, say of an epoch's end"
            )
        raise EmptyDataset(f"no batch at all for rank {empty}, but for others; give each rank a part of the data")
    padding = Microbatch((held[-1] if held else feed.spare).batch, 0, None)  # type: ignore[union-attr]
    missing = length - len(held)
    return StepBatch(
        held + [padding] * missing,
        weights + [0.0] * missing,
        sum(row[0] for row in told),
        int(sum(row[1] for row in told)),
        sum(map(_tokens, held)),
        seconds,
        _place([(row[5], row[6]) for row in told]),
    )


def agreed_place(feed: Source) -> float:
    """Where the feed is, in epochs: the same on all ranks. Collective."""
    return feed.position if feed.lockstep else _place(collectives.gather(_told(feed), "where the data are"))


def _told(feed: Source) -> tuple[float, int]:
    """This rank's position and length; 0, where that is unknown."""
    return feed.position, feed.length() or 0


def _place(told: Sequence[tuple[float, float]]) -> float:
    """From each rank's position and length: that of the longest; where one is unknown, no more than the epoch is."""
    if not all(length for _, length in told):
        return min(position for position, _ in told)
    return max(told, key=lambda each: each[1])[0]


def _weight(microbatch: Microbatch, loss_weight: LossWeight | None) -> float:
    if microbatch.samples == 0:
        return 0.0
    return float(microbatch.samples) if loss_weight is None else float(loss_weight(microbatch.batch))


def _tokens(microbatch: Microbatch) -> int:
    """How many tokens there are: the elements of ``input_ids``, where the batch has them."""
    if microbatch.samples and isinstance(microbatch.batch, Mapping):
        ids = microbatch.batch.get("input_ids")
        if isinstance(ids, torch.Tensor):
            return ids.numel()
    return 0
