"""This rank's shards of a model's tensors, each listed once under its name in the model, with its process groups.

Measurements of shards are reduced to those of full tensors in any parallel mode, and stay on the device until read, so
that reading costs one device sync.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dalsegno.distributed import accelerator
from dalsegno.distributed.stage_places import is_on_other_stage, place_of
from dalsegno.errors import ConfigurationError

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_IN_EACH = "_mod"  # a search for it takes less time than a look-up of thousands of names in a cache

_NOTHING = torch.zeros(0, dtype=torch.float64)

_layout, _dtype = attrgetter("layout"), attrgetter("dtype")  # faster than lambdas: called for hundreds of tensors


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's shard of a tensor."""

    name: str
    local: Tensor
    """Dense and real; without elements if the rank stores none."""
    groups: tuple[ProcessGroup, ...]
    """The process groups that the tensor is sharded over; empty if every rank has the full tensor."""
    exists: bool = True
    """False for a gradient that no backward pass has reached; listed anyway, so that all ranks reduce alike."""


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return each parameter once, a tied one under its first name, without wrappers' prefixes."""
    return [(strip_wrappers(name), parameter) for name, parameter in model.named_parameters()]


def check_materialized(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if torch.nn.parameter.is_lazy(tensor):
            raise ConfigurationError(
                f"model: {strip_wrappers(name)} of a lazy module has no shape yet, so no optimizer can train it and no "
                "checkpoint fits it; call the model on a batch once before you build the optimizer"
            )
        if tensor.is_meta:
            whose = "is in another pipeline stage; build a new model for each trainer"
            how = "has no values: it is on the meta device; materialize the model, or build it on a device"
            raise ConfigurationError(f"model: {strip_wrappers(name)} {how if place_of(tensor) is None else whose}")


def parameter_shards(model: nn.Module) -> list[LocalShard]:
    """Return the shards of all parameters, including frozen ones, but not quantized ones."""
    return [
        LocalShard(name, own_part(parameter, parameter.detach()), shard_groups(parameter))
        for name, parameter in named_parameters(model)
        if holds_numbers(parameter)
    ]


def gradient_shards(model: nn.Module) -> list[LocalShard]:
    """Return the shards of all gradients of trainable parameters."""
    return [_gradient_shard(name, each) for name, each in named_parameters(model) if each.requires_grad]


def are_finite(model: nn.Module) -> bool:
    """Whether this rank's shards of the parameters contain no NaN or infinity; of quantized ones, the scales. Syncs the
    device; no collective."""
    held = [part for each in model.parameters() if not is_on_other_stage(each) for part in plain_parts(each.detach())]
    extremes: dict[object, list[Tensor]] = defaultdict(list)
    for values in (dense(part) for part in held if holds_numbers(part)):
        if values.numel():
            # Both propagate NaN. On a CPU it takes a tenth of the time of a norm.
            extremes[values.dtype, values.device] += torch.aminmax(values)
    return all(bool(torch.stack(each).isfinite().all()) for each in extremes.values())


def device_of(model: nn.Module) -> torch.device:
    """Return the model's device; the CPU for a model without parameters."""
    places = ((parameter, place_of(parameter)) for parameter in model.parameters())
    return next((each.device if place is None else place.device for each, place in places), torch.device("cpu"))


def strip_wrappers(name: str) -> str:
    """Remove the prefixes of torch.compile, activation checkpointing and other wrappers from a parameter's name."""
    if _IN_EACH in name:
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
    return name


def unexpanded(tensor: Tensor) -> Tensor:
    """View an expanded tensor without its repetitions, so that it can be written to."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; neither copied nor detached."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor. Collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def dense(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, dense and real; of a sparse gradient, the values of its elements."""
    local = local_part(tensor)
    if local.is_sparse:
        local = local.coalesce().values()
    return torch.view_as_real(local) if local.is_complex() else local


def own_part(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``, which is placed like ``parameter``, dense and real. It has no rows where
    another pipeline stage stores the parameter, or counts it in sums over the ranks."""
    place = place_of(parameter)
    if place is None or place.counts:
        return dense(tensor)
    rest = (2,) if tensor.is_complex() else ()
    return torch.empty((0, *tensor.shape[1:], *rest), dtype=tensor.dtype.to_real(), device=place.device)


def shard_groups(tensor: Tensor) -> tuple[ProcessGroup, ...]:
    """Return the process groups that a tensor is sharded over; empty if every rank has the full tensor."""
    if (place := place_of(tensor)) is not None:
        return place.groups
    return mesh_groups(tensor)


def mesh_groups(tensor: Tensor) -> tuple[ProcessGroup, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(
        mesh.get_group(dimension)
        for dimension, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(dimension) > 1
    )


class DeviceScalars:
    """One number per name, kept on a device until :meth:`read`."""

    def __init__(self, names: Sequence[str], values: Tensor) -> None:
        """``values``: shape (number of names,)."""
        self.names = list(names)
        self.values = values

    def read(self) -> dict[str, float]:
        """Return name to number. Syncs the device once."""
        return dict(zip(self.names, self.values.tolist(), strict=True))

    def roots(self) -> DeviceScalars:
        """Return the square root (fp32) of each."""
        return DeviceScalars(self.names, self.values.sqrt().float())


def read_together(several: Sequence[DeviceScalars]) -> list[dict[str, float]]:
    """Read several with one device sync."""
    filled = [accelerator.wide(each.values) for each in several if each.names]
    numbers = iter(torch.cat(filled).tolist() if filled else [])
    return [{name: next(numbers) for name in each.names} for each in several]


@dataclass(frozen=True, slots=True)
class PartialSums:
    """Measurements of this rank's shards, which are yet to be summed over the ranks that share each tensor."""

    pieces: Sequence[tuple[str, tuple[ProcessGroup, ...], bool]]
    """Name, process groups and existence of each tensor, as in :class:`LocalShard`."""
    values: Tensor
    """Shape (number of pieces,), float64."""

    @classmethod
    def of(cls, pieces: Sequence[LocalShard], values: Tensor) -> Self:
        return cls([(piece.name, piece.groups, piece.exists) for piece in pieces], values)


def partial_squares(pieces: Sequence[LocalShard]) -> PartialSums:
    """Return the squared L2 norm of each shard. No collective."""
    return PartialSums.of(pieces, squared_norms([piece.local for piece in pieces]) if pieces else _NOTHING)


def whole_sums(several: Sequence[PartialSums]) -> list[DeviceScalars]:
    """Sum each over the ranks, and leave out tensors that do not exist. One collective if tensors are sharded."""
    filled = [each for each in several if each.pieces]
    values = torch.cat([each.values for each in filled]) if filled else _NOTHING
    sums = summed(values, [groups for each in filled for _, groups, _ in each.pieces])
    parts = torch.split(sums, [len(each.pieces) for each in several])
    return [_existing(each, its) for each, its in zip(several, parts, strict=True)]


def _existing(partial: PartialSums, values: Tensor) -> DeviceScalars:
    existing = [number for number, (_, _, exists) in enumerate(partial.pieces) if exists]
    if len(existing) < len(partial.pieces):
        values = values[torch.tensor(existing, dtype=torch.long)]
    return DeviceScalars([partial.pieces[number][0] for number in existing], values)


def norms(pieces: Sequence[LocalShard]) -> DeviceScalars:
    """Return the L2 norm (fp32) of every existing tensor. A collective if tensors are sharded."""
    (squares,) = whole_sums([partial_squares(pieces)])
    return squares.roots()


def total_norm(readings: DeviceScalars) -> Tensor:
    """Return the norm over all tensors, from their individual norms: 0-dim, on the device."""
    return accelerator.wide(readings.values).norm() if len(readings.names) else torch.zeros((), dtype=torch.float64)


def reduced(pieces: Sequence[LocalShard], measure: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Apply ``measure``, which returns a number or a row of numbers (float64) for each tensor of a list, to the local
    tensors, and sum over the ranks that share each: shape (number of pieces, …), float64."""
    if not pieces:
        return _NOTHING
    return summed(measure([piece.local for piece in pieces]), [piece.groups for piece in pieces])


def summed(measured: Tensor, groups: Sequence[tuple[ProcessGroup, ...]]) -> Tensor:
    """Sum measurements of this rank's shards, shape (number of tensors, …), over the ranks that share each tensor, in
    one collective; they may be changed in place. ``groups``: the process groups of each tensor."""
    group = joint_group(groups)
    if group is None:
        return measured
    members = [number for number, its in enumerate(groups) if its]
    chosen: Any = slice(None) if len(members) == len(groups) else torch.tensor(members, device=measured.device)
    part = measured[chosen]
    dist.all_reduce(part, group=group)
    copies = [copies_in(group, groups[number]) for number in members]
    if any(each > 1 for each in copies):
        part /= torch.tensor(copies, device=part.device).view(-1, *(1 for _ in part.shape[1:]))
    measured[chosen] = part
    return measured


def joint_group(groups: Sequence[tuple[ProcessGroup, ...]]) -> ProcessGroup | None:
    """Return the process group in which one collective reduces measurements of all these tensors, each with its
    ``groups``: theirs if they are sharded over a single one, else all ranks; None if no tensor is sharded."""
    every = {group for its in groups for group in its}
    return every.pop() if len(every) == 1 else dist.group.WORLD if every else None


def copies_in(group: ProcessGroup, its: tuple[ProcessGroup, ...]) -> int:
    """Return how often the ranks of ``group`` hold a tensor that is sharded over the process groups ``its``: a sum over
    these ranks counts it as often."""
    return group.size() // math.prod(each.size() for each in its)


def squared_norms(tensors: list[Tensor]) -> Tensor:
    """Return shape (number of tensors,), float64."""
    has_double = torch.float64 in set(map(_dtype, tensors))
    dtype = torch.float64 if has_double else torch.float32  # _foreach_norm cannot narrow
    return accelerator.wide(torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))).square()


def local_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's shard of each gradient, dense and real, sharded as its parameter."""
    is_plain = set(map(type, gradients)) == {Tensor} and set(map(_layout, gradients)) == {torch.strided}
    if is_plain and not any(dtype.is_complex for dtype in set(map(_dtype, gradients))):
        return [*gradients]  # fast path for the usual case of hundreds of plain tensors
    return [dense(complete(*each)) for each in zip(parameters, gradients, strict=True)]


def complete(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Sum a gradient that is spread as partial sums, as that of a norm under sequence parallelism is."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient


def _gradient_shard(name: str, parameter: nn.Parameter) -> LocalShard:
    gradient, place = parameter.grad, place_of(parameter)
    if place is not None and (gradient is None or not place.counts):
        # Which gradients exist on other stages is unknown here: each is listed, as zero if there is none.
        return LocalShard(name, torch.zeros(0, device=place.device), place.groups)
    local = torch.zeros((), device=parameter.device) if gradient is None else dense(complete(parameter, gradient))
    return LocalShard(name, local, shard_groups(parameter), gradient is not None)


# --- subclasses, such as quantized weights, whose data are other tensors (``__tensor_flatten__``) -------------------


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors of a tensor on this rank: itself, or those that it wraps."""
    tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from plain_parts(getattr(tensor, name))


def holds_numbers(tensor: Tensor) -> bool:
    """Whether the elements are numbers to calculate with; not if they are quantized: integers, float8 or wrapped."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return (tensor.is_floating_point() or tensor.is_complex()) and (
        tensor.dtype.itemsize > 1 and not hasattr(local, "__tensor_flatten__")
    )
