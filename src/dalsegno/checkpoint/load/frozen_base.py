"""Comparison of a run's frozen parameters with those that a checkpoint was saved without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch.distributed.tensor import DTensor

from dalsegno.checkpoint.format.fingerprints import Fingerprint, read_fingerprints
from dalsegno.checkpoint.format.index import Index
from dalsegno.checkpoint.format.manifest import Checkpoint
from dalsegno.checkpoint.state.contract import ShardedState, Tensors
from dalsegno.checkpoint.state.model import ModelState
from dalsegno.checkpoint.state.sharding import box_here
from dalsegno.distributed import collectives
from dalsegno.distributed.stage_places import is_on_other_stage
from dalsegno.stateful.component import State

from .compatibility import Change


def find_other_base(
    checkpoint: Checkpoint, index: Index, rests: Mapping[str, State], sharded: Sequence[ShardedState]
) -> list[Change]:
    """Compare the frozen parameters that the checkpoint omits with the models'. Collective: a sharded parameter is
    gathered, one at a time. Returns a change for each model that differs, with its first differing parameter.

    Args:
        checkpoint: verified.
        index: of its tensors.
        rests: saved rest of each component, by its key. A component without one is not compared.
        sharded: the components to load.

    Raises:
        StateMismatch: on all ranks, if a parameter is in uneven shards.
    """
    if not index.absent:
        return []
    fingerprints = collectives.run_on_all_ranks(lambda: read_fingerprints(checkpoint, index))
    changes = []
    for component in sharded:
        if not isinstance(component, ModelState) or component.key not in rests:
            continue
        if absent := component.absent(index, rests[component.key]):
            of_component = {name: fingerprints[f"{component.key}.{name}"] for name in absent}
            collectives.run_on_all_ranks(partial(_check_even, component.key, absent))
            others = _differing(absent, of_component)
            of_ranks = collectives.gather(others[:1], "whether the frozen parameters are the same")
            first = min((name for names in of_ranks for name in names), default=None)
            if first is not None:
                line = f'{first}: has other values than the ones that save_frozen="never" left out; use the same base'
                changes.append(Change.of_part(component.key, component.class_name, component.class_name, [line]))
    return changes


def _check_even(component: str, tensors: Tensors) -> None:
    """Gathering a tensor in uneven shards would hang on some ranks."""
    for name, tensor in tensors.items():
        box_here(tensor, f"{component}.{name}")


def _differing(tensors: Tensors, fingerprints: dict[str, Sequence[Fingerprint]]) -> list[str]:
    """Names of the tensors that differ, in order. Goes through all of them, since the other ranks do."""
    names = []
    for name in sorted(tensors):
        if is_on_other_stage(tensor := tensors[name]):
            continue
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not all(each.fits(full) for each in fingerprints[name]):
            names.append(name)
    return names
