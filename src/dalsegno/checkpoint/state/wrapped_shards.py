"""Wrapped tensors that are sharded over ranks: each rank wraps its own shard, and has the plain parts of that one.

The parts of all ranks, one after the other, make a tensor that is sharded along its first dimension. If each part has a
row for each row of the shard (a scale for each row, say), these are the parts of the whole tensor, which any number of
ranks can load. Otherwise (a scale for each block, a table of values) only as many ranks can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dalsegno.errors import CannotSave

from .forms import SHARDED, Form, Parts


def of_all_ranks(whole: DTensor, shard: Parts, where: str) -> Parts:
    """The parts of a sharded tensor, as DTensors that share the memory of those of this rank's ``shard``, which is
    wrapped. ``where``: the tensor's full name, for errors.

    Raises:
        CannotSave: on a rank at least, if the ranks have shards of different sizes whose parts are not rows.
    """
    assert shard.form is not None, "it is wrapped"
    cuts = [number for number, placement in enumerate(whole.placements) if not placement.is_replicate()]
    dimensions = [_cut_dimension(whole.placements[number], where) for number in cuts]
    if not cuts:
        return Parts({end: _joined(whole, part, part.shape) for end, part in shard.tensors.items()}, shard.form)
    if dimensions == [0] and _has_parts_of_rows(shard, whole._local_tensor):
        rows = whole.shape[0]
        tensors = {end: _joined(whole, part, (rows, *part.shape[1:])) for end, part in shard.tensors.items()}
        return Parts(tensors, {**shard.form, "shape": [*whole.shape]})
    sizes = [whole.device_mesh.size(number) for number in cuts]
    for dimension in {*dimensions}:
        count = math.prod(size for size, cut in zip(sizes, dimensions, strict=True) if cut == dimension)
        if whole.shape[dimension] % count:
            raise CannotSave(
                f"{where}: cannot save a {type(whole._local_tensor).__qualname__} whose {whole.shape[dimension]} rows "
                f"are sharded over {count} ranks: the shards differ in size. Use a size that {count} divides, or keep "
                "it whole on each rank, e.g. by fully_shard(…, ignored_params=…)"
            )
    tensors = {}
    for end, part in shard.tensors.items():
        part = part if part.dim() else part.view(1)
        tensors[end] = _joined(whole, part, (part.shape[0] * math.prod(sizes), *part.shape[1:]))
    form: Form = {
        "class": f"{SHARDED}{shard.form['class']}",
        "shape": [*whole.shape],
        "dtype": shard.form["dtype"],
        "context": {"mesh": [*whole.device_mesh.shape], "placements": [str(each) for each in whole.placements]},
        "parts": {"": shard.form},
    }
    return Parts(tensors, form)


def _cut_dimension(placement: Placement, where: str) -> int:
    if not isinstance(placement, Shard | _StridedShard):
        raise CannotSave(
            f"{where}: cannot save a DTensor with {placement}; redistribute it to Shard or Replicate first"
        )
    return placement.dim


def _has_parts_of_rows(shard: Parts, local: torch.Tensor) -> bool:
    return all(part.dim() and part.shape[0] == local.shape[0] for part in shard.tensors.values()) and not any(
        shard.form["parts"].values() if shard.form else ()
    )


def _joined(whole: DTensor, part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The parts of all ranks as one tensor of ``shape``. Not by ``from_local``, which moves a part to the mesh's device
    if the shard was offloaded: a load would fill a copy."""
    placements: Sequence[Placement] = [each if each.is_replicate() else Shard(0) for each in whole.placements]
    stride = torch.empty(tuple(shape), device="meta").stride()
    spec = DTensorSpec(whole.device_mesh, tuple(placements), TensorMeta(torch.Size(shape), stride, part.dtype))
    return DTensor(part.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]
