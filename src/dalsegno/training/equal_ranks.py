"""Checks that the ranks have equal models where a checkpoint contains one for all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash
from torch.distributed.tensor import DTensor

from dalsegno.checkpoint import ShardedState
from dalsegno.distributed import collectives
from dalsegno.distributed.stage_places import place_of
from dalsegno.errors import CannotSave

from .flags import sum_of_bytes


def expect_equal_ranks(states: Iterable[ShardedState]) -> None:
    """Compare all tensors that are not sharded. Collective: one small reduction, if they are equal.

    Raises:
        CannotSave: on every rank, if one differs between the ranks; names it.
    """
    if collectives.world_size() == 1:
        return
    with torch.no_grad():
        sums = {
            f"{state.key}: {name}": sum_of_bytes(tensor)
            for state in states
            for name, tensor in state.capture().tensors.items()
            if not isinstance(tensor, DTensor) and place_of(tensor) is None
        }
        found = {name: int(each) for name, each in sums.items()}
    digest = xxhash.xxh3_64_intdigest(repr(found).encode()) >> 1
    highest, lowest = collectives.all_reduce_max([digest, -digest], "whether the ranks have equal models")
    if highest == -lowest:
        return
    of_ranks = collectives.gather(found, "tensors that differ between the ranks")
    name = next(name for each in of_ranks for name in each if len({its.get(name) for its in of_ranks}) > 1)
    odd = [rank for rank, its in enumerate(of_ranks) if its.get(name) != of_ranks[0].get(name)]
    raise CannotSave(
        f"{name}: differs between rank 0 and rank {', '.join(map(str, odd))}. A checkpoint contains one model, with "
        "which all ranks of a resumed run would continue. Average the gradients: parallel='ddp', or in a loop of your "
        "own DistributedDataParallel or an all_reduce; or average the weights before each save. To train several "
        "models, start a job of one rank for each, with its own output_dir"
    )
