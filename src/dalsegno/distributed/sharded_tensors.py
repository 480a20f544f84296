"""A model's tensors as this rank holds them: each once, under the model's own name, with the ranks that hold the rest.

What is measured of them here is that of whole tensors, whichever way the model is spread, and stays on its device until
it is read: one wait for all of them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dalsegno.errors import ConfigurationError

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")

_layout, _dtype = attrgetter("layout"), attrgetter("dtype")  # of hundreds of tensors, each time


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's part of a tensor."""

    name: str
    local: Tensor
    """Dense and real; of no elements where the rank has none."""
    groups: tuple[ProcessGroup, ...]
    """Over which the tensor is split; empty where every rank has all of it."""
    exists: bool = True
    """False: a gradient that no backward has reached. It is there all the same, so that all ranks reduce alike."""


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Each parameter once, a tied one under its first name, without the traces of wrappers."""
    return [(strip_wrappers(name), parameter) for name, parameter in model.named_parameters()]


def expect_materialized(model: nn.Module) -> None:
    """
    Raises:
        ConfigurationError: if a parameter or buffer of a lazy module has no shape yet.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if torch.nn.parameter.is_lazy(tensor):
            raise ConfigurationError(
                f"model: {strip_wrappers(name)} of a lazy module has no shape yet, so no optimizer can train it and no "
                "checkpoint fits it; call the model with a batch once, before it is given to an optimizer"
            )


def parameter_shards(model: nn.Module) -> list[LocalShard]:
    """Of all parameters, frozen ones too."""
    return [
        LocalShard(name, dense(parameter.detach()), shard_groups(parameter))
        for name, parameter in named_parameters(model)
    ]


def gradient_shards(model: nn.Module) -> list[LocalShard]:
    """Of all gradients of parameters that are trained."""
    return [_gradient_piece(name, each) for name, each in named_parameters(model) if each.requires_grad]


def are_finite(model: nn.Module) -> bool:
    """Whether this rank's parts of the parameters hold no NaN and no infinity. Waits for the device; no collective."""
    pieces = [piece.local for piece in parameter_shards(model)]
    parts = [part for part in pieces if part.is_floating_point() and part.numel()]
    largest = torch._foreach_norm(parts, torch.inf) if parts else ()  # NaN is not lost in a maximum
    return all(bool(each.isfinite()) for each in largest)


def device_of(model: nn.Module) -> torch.device:
    """Where the model lies; the CPU, for one without parameters."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


@functools.lru_cache(maxsize=1 << 16)
def strip_wrappers(name: str) -> str:
    """A parameter's name without the traces of torch.compile, activation checkpointing and the like."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def once(tensor: Tensor) -> Tensor:
    """The same memory without the repetitions of an expanded tensor, so that it can be written to."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def dense(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, dense and real."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.is_sparse:
        local = local.coalesce().values()
    return torch.view_as_real(local) if local.is_complex() else local


def shard_groups(tensor: Tensor) -> tuple[ProcessGroup, ...]:
    """The groups over which a tensor is split; empty where every rank has all of it."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(
        mesh.get_group(dimension)
        for dimension, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(dimension) > 1
    )


class DeviceScalars:
    """A number for each of some names, on a device until :meth:`read`."""

    def __init__(self, names: Sequence[str], values: Tensor) -> None:
        """``values``: shape (number of names,)."""
        self.names = list(names)
        self.values = values

    def read(self) -> dict[str, float]:
        """Name to number. Waits for the device, once."""
        return dict(zip(self.names, self.values.tolist(), strict=True))


def read_together(several: Sequence[DeviceScalars]) -> list[dict[str, float]]:
    """What each of them reads, with one wait for all."""
    filled = [each.values.double() for each in several if each.names]
    numbers = iter(torch.cat(filled).tolist() if filled else [])
    return [{name: next(numbers) for name in each.names} for each in several]


def norms(pieces: Sequence[LocalShard]) -> DeviceScalars:
    """The L2 norm, in fp32, of every tensor that exists. A collective where tensors are sharded."""
    measured = reduced(pieces, squared_norms)
    existing = [number for number, piece in enumerate(pieces) if piece.exists]
    values = measured.sqrt().float()
    chosen = values if len(existing) == len(pieces) else values[torch.tensor(existing, dtype=torch.long)]
    return DeviceScalars([pieces[number].name for number in existing], chosen)


def total_norm(readings: DeviceScalars) -> Tensor:
    """Of all the tensors together, from the norms of each: 0-dim, on the device."""
    return readings.values.double().norm() if len(readings.names) else torch.zeros((), dtype=torch.float64)


def reduced(pieces: Sequence[LocalShard], measure: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """What ``measure`` says of each local tensor, summed over the ranks that share it.

    Args:
        measure: of a list of tensors, a vector of float64 with a number, or a row of numbers, for each.

    Returns:
        Shape (number of pieces, …), float64, in the order of ``pieces``.
    """
    if not pieces:
        return torch.zeros(0, dtype=torch.float64)
    return summed(measure([piece.local for piece in pieces]), [piece.groups for piece in pieces])


def summed(measured: Tensor, groups: Sequence[tuple[ProcessGroup, ...]]) -> Tensor:
    """What this rank has measured of its parts of some tensors, summed over the ranks that share each.

    Args:
        measured: shape (number of tensors, …); may be changed.
        groups: of each tensor.
    """
    by_groups: dict[tuple[ProcessGroup, ...], list[int]] = defaultdict(list)
    for number, its in enumerate(groups):
        if its:
            by_groups[its].append(number)
    for its, members in by_groups.items():
        chosen: Any = slice(None) if len(members) == len(groups) else torch.tensor(members, device=measured.device)
        part = measured[chosen]
        for group in its:
            dist.all_reduce(part, group=group)
        measured[chosen] = part
    return measured


def squared_norms(tensors: list[Tensor]) -> Tensor:
    """Shape (number of tensors,), float64."""
    has_double = torch.float64 in set(map(_dtype, tensors))
    dtype = torch.float64 if has_double else torch.float32  # the norm itself cannot narrow
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).double().square()


def local_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> list[Tensor]:
    """This rank's piece of each, dense and real, split as its parameter is."""
    is_plain = set(map(type, gradients)) == {Tensor} and set(map(_layout, gradients)) == {torch.strided}
    if is_plain and not any(dtype.is_complex for dtype in set(map(_dtype, gradients))):
        return [*gradients]  # most are so, and there are hundreds
    return [_local_gradient(*each) for each in zip(parameters, gradients, strict=True)]


def _local_gradient(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return dense(gradient)


def _gradient_piece(name: str, parameter: nn.Parameter) -> LocalShard:
    gradient = parameter.grad
    local = torch.zeros((), device=parameter.device) if gradient is None else _local_gradient(parameter, gradient)
    return LocalShard(name, local, shard_groups(parameter), gradient is not None)
