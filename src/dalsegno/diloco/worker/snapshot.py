"""GlobalSnapshot: the global parameters as a worker knows them, sharded as its model is.

On several ranks, a worker's ranks act as one: full tensors are gathered for rank 0, which talks to the server, and
broadcast from it. One full tensor at a time is in memory, never the model. Of a pipeline, each rank has the parameters
of its own stages; rank 0 gets the full tensors of the others from the first rank that stores them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dalsegno.checkpoint.tensor_files import as_bytes
from dalsegno.diloco.wire.messages import in_file_order
from dalsegno.diloco.wire.signature import Specs, TensorSpec, as_received, quantize, specs_of
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import full_tensor, local_part, named_parameters
from dalsegno.distributed.stage_places import is_on_other_stage, like_parameter, place_of
from dalsegno.errors import ConfigurationError


class GlobalSnapshot:
    """Global parameters of ``model``'s trained parameters, in their dtypes. ``keeps_errors``: for quantized
    pseudo-gradients."""

    def __init__(self, model: nn.Module, *, keeps_errors: bool = False) -> None:
        self.specs = specs_of(model)
        self._parameters = {name: each for name, each in named_parameters(model) if each.requires_grad}
        self.tensors = {name: _empty_like(each, each.dtype) for name, each in self._parameters.items()}
        """By name. Without values until the first parameters are received or restored."""
        self.errors: dict[str, Tensor] = {}
        """By name, float32: what quantization has lost of the pseudo-gradients sent; they are part of the next ones."""
        if keeps_errors:
            self.errors = {name: _empty_like(each, torch.float32).zero_() for name, each in self._parameters.items()}
        self.is_sharded = any(
            isinstance(each, DTensor) or place_of(each) is not None for each in self._parameters.values()
        )
        """Whether several ranks together produce the full tensors."""

    def check_ranks(self) -> None:
        """Collective."""
        everywhere = collectives.gather(self.specs, "the parameters that DiLoCo synchronizes")
        if any(specs != everywhere[0] for specs in everywhere):
            raise ConfigurationError(
                "DiLoCo: the ranks of this worker train different parameters; they act as one worker, so build the "
                "same model on all of them, and let parallel= shard it or cut it into stages"
            )

    def differences(self, sent: Specs) -> Iterator[Tensor]:
        """Pseudo-gradients, full and on the CPU, in the order of a frame. Collective if sharded."""
        for spec in in_file_order(sent):
            yield self._for_rank_zero(spec, partial(self._changed, spec))

    def parameters(self) -> Iterator[Tensor]:
        """The model's own parameters, full and on the CPU, in the order of a frame. Collective if sharded."""
        for spec in in_file_order(self.specs):
            yield self._for_rank_zero(spec, lambda of: full_tensor(of.detach()))

    def _changed(self, spec: TensorSpec, now: Tensor) -> Tensor:
        """The full tensor to send."""
        if spec.dtype == torch.int8:
            return quantize(self._difference_and_error(spec.name))
        wide = torch.promote_types(spec.dtype, torch.float32)
        return full_tensor((self.tensors[spec.name].to(wide) - now.detach().to(wide)).to(spec.dtype))

    def _for_rank_zero(self, spec: TensorSpec, full: Callable[[Tensor], Tensor]) -> Tensor:
        """A full tensor on the CPU, whose values count on rank 0; collective if the parameter is sharded. ``full``
        makes it from the parameter, on the ranks that store that."""
        parameter = self._parameters[spec.name]
        place = place_of(parameter)
        if place is None:
            return full(parameter).cpu()
        if is_on_other_stage(parameter):
            whole = torch.empty(spec.shape, dtype=spec.dtype, device=place.device)
        else:
            whole = full(parameter).contiguous()
        source = place.meshes[0][0]
        if source != 0:
            dist.broadcast(as_bytes(whole), src=source)
        return whole.cpu()

    def _difference_and_error(self, name: str) -> Tensor:
        """The full tensor to quantize."""
        return full_tensor(self.tensors[name].float() - self._parameters[name].detach().float() + self.errors[name])

    @torch.no_grad()
    def remaining_errors(self, sent: Specs) -> dict[str, Tensor]:
        """What is left of the differences once their quantized values have been sent. Collective if sharded. ``sent``:
        names and dtypes; nothing is left of a dtype other than int8."""
        remaining = {}
        for spec in sent:
            if spec.dtype == torch.int8 and not is_on_other_stage(self._parameters[spec.name]):
                whole = self._difference_and_error(spec.name)
                left = _placed_like(self.errors[spec.name], whole - as_received(whole))
                remaining[spec.name] = like_parameter(left, self._parameters[spec.name])
        return remaining

    def no_errors(self, sent: Specs) -> dict[str, Tensor]:
        """As :meth:`remaining_errors`, if quantization had lost nothing."""
        return {spec.name: _empty_like(self._parameters[spec.name], torch.float32).zero_() for spec in sent}

    @torch.no_grad()
    def take(self, spec: TensorSpec, whole: Tensor) -> None:
        """Take the global value of a parameter from rank 0. Collective on several ranks. ``whole``: the full tensor on
        rank 0, on the CPU; elsewhere one of the same shape, whose values do not count."""
        if collectives.initialized():
            whole = whole.to(collectives.communication_device())
            dist.broadcast(as_bytes(whole), src=0)
        target = self.tensors[spec.name]
        if not is_on_other_stage(self._parameters[spec.name]):
            local_part(target).copy_(local_part(_placed_like(target, whole)))

    @torch.no_grad()
    def adopt(self, specs: Specs, share: float = 0.0) -> None:
        """Move the model's parameters to the global ones: ``share · own + (1 − share) · global``."""
        here = [spec.name for spec in specs if not is_on_other_stage(self._parameters[spec.name])]
        own = [local_part(self._parameters[name]) for name in here]
        globals_ = [local_part(self.tensors[name]) for name in here]
        if not here:  # a pipeline's other stages have the whole fragment
            return
        if share == 0:
            torch._foreach_copy_(own, globals_)
        else:
            torch._foreach_lerp_(own, globals_, 1 - share)


def _empty_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor without values, sharded and stored like ``parameter``."""
    return like_parameter(torch.empty_like(parameter, dtype=dtype, requires_grad=False), parameter)


def _placed_like(target: Tensor, whole: Tensor) -> Tensor:
    """``whole``, which every rank has, sharded as ``target``."""
    if not isinstance(target, DTensor):
        return whole
    mesh = target.device_mesh
    return distribute_tensor(whole.to(mesh.device_type), mesh, target.placements, src_data_rank=None)
