"""StepBatch: the micro-batches of one step and their weights, agreed across ranks.

A step's loss is the mean over its samples on all ranks. So a micro-batch's own mean loss is multiplied by its weight
(its number of samples, or the result of ``loss_weight``) divided by the weight of the whole step, which every rank must
know.

For data of our sampler, that weight is known. For other data, or with ``loss_weight``, the ranks exchange weights in
one small collective per step. A rank that has run out of data then repeats its last batch at weight zero until all
ranks have, because the others would otherwise wait for it forever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch

from dalsegno.distributed import collectives
from dalsegno.distributed.layout import Layout
from dalsegno.errors import ConfigurationError, EmptyDataset, StateMismatch

from .digests import digest
from .loader import Microbatch, plain_batch
from .map_loader import MapLoader
from .user_loader import UserLoader

MicrobatchLoader = MapLoader | UserLoader
"""A loader of training or evaluation data."""

LossWeight = Callable[[Any], float]
"""Weight of a batch's mean loss within its step, e.g. its number of tokens."""


Cut = Callable[[Microbatch], Sequence[Microbatch]]
"""Makes of a micro-batch that a loader yields those that are trained on, one or several."""


@dataclass(slots=True)
class StepBatch:
    """One step's micro-batches on this rank."""

    microbatches: list[Microbatch]
    weights: list[float]
    """Weights of the micro-batches' mean losses."""
    total: float
    """Sum of all weights on all data ranks."""
    samples: int
    """Number of samples on all data ranks."""
    tokens: int
    """Number of tokens on this rank."""
    seconds: float
    """Time that this rank spent reading them, without waiting for other ranks."""
    place: float
    """Position behind the step, in epochs; equal on all ranks. If each rank has its own loader, that of the longest."""

    def share(self, index: int) -> float:
        """Return this micro-batch's share of the step's loss; the shares of all data ranks sum to 1."""
        return self.weights[index] / self.total if self.total else 0.0


def iter_steps(
    loader: MicrobatchLoader,
    sizes: Iterable[int],
    layout: Layout,
    loss_weight: LossWeight | None = None,
    cut: Cut | None = None,
) -> Iterator[StepBatch]:
    """Yield the rest of the epoch in steps of ``sizes`` micro-batches, endless and read step by step; the last step may
    be smaller. Raises EmptyDataset if one rank has no batch while another has one; ConfigurationError if the first
    batches differ between ranks that should read the same data."""
    rest = iter(loader) if cut is None else chain.from_iterable(map(cut, loader))
    alone = collectives.world_size() == 1
    known = loader.lockstep and loss_weight is None
    for number, size in enumerate(sizes):
        began = time.perf_counter()
        held = list(islice(rest, size))
        seconds = time.perf_counter() - began
        if number == 0 and layout.sharing > 1:
            _expect_same_data(held, layout)
        if alone or known:
            if not held:
                return
            yield _weigh(held, loss_weight, seconds, loader.position)
        else:
            step_batch = _weigh_together(held, loss_weight, seconds, loader, layout, cut)
            if step_batch is None:
                return
            yield step_batch


def _expect_same_data(held: Sequence[Microbatch], layout: Layout) -> None:
    digests = collectives.gather(digest([plain_batch(each.batch) for each in held]), "the data that ranks share")
    for rank, first in enumerate(layout.of_data_ranks(digests)):
        sharing = [other for other, number in enumerate(layout.data_ranks) if number == rank]
        if any(digests[other] != first for other in sharing):
            raise ConfigurationError(
                f"ranks {sharing} hold parts of one copy of the model, so they must read the same data, and their "
                "loaders yield different batches; let a loader of your own split its data by the data rank: "
                "layout = dalsegno.Layout.of(parallel), DistributedSampler(…, rank=layout.data_rank, "
                "num_replicas=layout.data_size)"
            )


def _weigh(held: list[Microbatch], loss_weight: LossWeight | None, seconds: float, place: float) -> StepBatch:
    weights, samples, tokens = [], 0, 0
    for microbatch in held:
        weights.append(float(microbatch.samples) if loss_weight is None else _weight(microbatch, loss_weight))
        samples += microbatch.samples if microbatch.global_samples is None else microbatch.global_samples
        tokens += tokens_in(microbatch.batch) if microbatch.samples else 0
    total = float(samples) if loss_weight is None else sum(weights)
    return StepBatch(held, weights, total, samples, tokens, seconds, place)


def _weigh_together(
    held: list[Microbatch],
    loss_weight: LossWeight | None,
    seconds: float,
    loader: MicrobatchLoader,
    layout: Layout,
    cut: Cut | None,
) -> StepBatch | None:
    weights = [_weight(microbatch, loss_weight) for microbatch in held]
    samples = sum(microbatch.samples for microbatch in held)
    last = held[-1] if held else loader.spare
    if last is not None and not held and cut is not None:
        last = cut(last)[0]
    rows = collectives.gather_floats(
        [
            sum(weights),
            samples,
            len(held),
            last is not None,
            loader.started,
            *_position_and_length(loader),
        ],
        "a step's samples",
    )
    length = int(max(row[2] for row in rows))
    if length == 0:
        return None
    if not all(row[3] for row in rows):
        empty = [rank for rank, row in enumerate(rows) if not row[3]]
        if any(rows[rank][4] for rank in empty):
            raise StateMismatch(
                f"rank {empty} had finished the epoch when the checkpoint was saved, other ranks had not, and the "
                "batch that it repeats until they have is not in the checkpoint (its type cannot be saved, or the "
                "checkpoint is older); resume from another checkpoint, e.g. of an epoch's end"
            )
        raise EmptyDataset(f"rank {empty} has no batch, but others have; give each rank a part of the data")
    assert last is not None, "every rank has a batch"
    padding = Microbatch(last.batch, 0, None)
    missing = length - len(held)
    rows = layout.of_data_ranks(rows)
    return StepBatch(
        held + [padding] * missing,
        weights + [0.0] * missing,
        sum(row[0] for row in rows),
        int(sum(row[1] for row in rows)),
        sum(tokens_in(each.batch) for each in held if each.samples),
        seconds,
        _place([(row[5], row[6]) for row in rows]),
    )


def agreed_position(loader: MicrobatchLoader, layout: Layout) -> float:
    """Return the position in epochs, equal on all ranks. Collective."""
    if loader.lockstep:
        return loader.position
    return _place(layout.of_data_ranks(collectives.gather(_position_and_length(loader), "where the data are")))


def _position_and_length(loader: MicrobatchLoader) -> tuple[float, int]:
    return loader.position, loader.length() or 0


def _place(rows: Sequence[tuple[float, float]]) -> float:
    """Return the position of the longest rank; if a length is unknown, the smallest position."""
    if not all(length for _, length in rows):
        return min(position for position, _ in rows)
    return max(rows, key=lambda each: each[1])[0]


def _weight(microbatch: Microbatch, loss_weight: LossWeight | None) -> float:
    if microbatch.samples == 0:
        return 0.0
    if loss_weight is None:
        return float(microbatch.samples)
    given = loss_weight(microbatch.batch)
    try:
        weight = float(given)
    except (TypeError, ValueError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ConfigurationError(f"loss_weight returned {given!r} for a batch; needs a number of at least 0")
    return weight


def tokens_in(batch: object) -> int:
    """Return the number of tokens: the elements of ``input_ids``, if the batch contains it."""
    if isinstance(batch, (dict, Mapping)):  # dict first: Mapping takes 1 µs
        ids = batch.get("input_ids")
        if isinstance(ids, torch.Tensor):
            return ids.numel()
    return 0
