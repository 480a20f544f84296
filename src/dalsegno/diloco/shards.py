"""GlobalSnapshot: the global parameters as a worker knows them, sharded as its model is.

On several ranks, a worker's ranks act as one: full tensors are gathered for rank 0, which talks to the server, and
scattered from it. One full tensor at a time is in memory, never the model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import named_parameters
from dalsegno.errors import ConfigurationError

from .frames import in_file_order
from .quantization import as_received, quantize
from .signature import Specs, TensorSpec, specs_of


class GlobalSnapshot:
    """Global parameters of ``model``'s trained parameters, in their dtypes.

    Args:
        model: without the wrapper of DDP or of the compiler.
        keeps_errors: for quantized pseudo-gradients.

    Raises:
        ConfigurationError: if no parameter is trained, or the ranks have different ones, as in a pipeline.
    """

    def __init__(self, model: nn.Module, *, keeps_errors: bool = False) -> None:
        self.specs = specs_of(model)
        self._parameters = {name: each for name, each in named_parameters(model) if each.requires_grad}
        self.tensors = {name: torch.empty_like(each, requires_grad=False) for name, each in self._parameters.items()}
        """By name. Without values until the first parameters are received or restored."""
        self.errors: dict[str, Tensor] = {}
        """By name, float32: what quantization has lost of the pseudo-gradients sent; they are part of the next ones."""
        if keeps_errors:
            self.errors = {
                name: torch.zeros_like(each, dtype=torch.float32, requires_grad=False)
                for name, each in self._parameters.items()
            }
        self.is_sharded = any(isinstance(each, DTensor) for each in self._parameters.values())

    def check_ranks(self) -> None:
        """
        Raises:
            ConfigurationError: on every rank, if the ranks train different parameters. Collective.
        """
        everywhere = collectives.gather(self.specs, "the parameters that DiLoCo synchronizes")
        if any(specs != everywhere[0] for specs in everywhere):
            raise ConfigurationError(
                "DiLoCo: the ranks of this worker train different parameters, as in a pipeline; DiLoCo works on one "
                "process, with DDP, and with FSDP2"
            )

    def differences(self, sent: Specs) -> Iterator[Tensor]:
        """Pseudo-gradients, full and on the CPU, in the order of a frame. Collective if sharded.

        Args:
            sent: names and dtypes.
        """
        for spec in in_file_order(sent):
            yield self._difference(spec)

    def parameters(self) -> Iterator[Tensor]:
        """The model's own parameters, full and on the CPU, in the order of a frame. Collective if sharded."""
        for spec in in_file_order(self.specs):
            yield _full(self._parameters[spec.name].detach()).cpu()

    @torch.no_grad()
    def _difference(self, spec: TensorSpec) -> Tensor:
        if spec.dtype == torch.int8:
            return quantize(self._difference_and_error(spec.name)).cpu()
        before, now = self.tensors[spec.name], self._parameters[spec.name]
        wide = torch.promote_types(spec.dtype, torch.float32)
        return _full((before.to(wide) - now.detach().to(wide)).to(spec.dtype)).cpu()

    def _difference_and_error(self, name: str) -> Tensor:
        """The full tensor to quantize."""
        return _full(self.tensors[name].float() - self._parameters[name].detach().float() + self.errors[name])

    @torch.no_grad()
    def remaining_errors(self, sent: Specs) -> dict[str, Tensor]:
        """What is left of the differences once their quantized values have been sent. Collective if sharded.

        Args:
            sent: names and dtypes; nothing is left of a dtype other than int8.
        """
        remaining = {}
        for spec in sent:
            if spec.dtype == torch.int8:
                whole = self._difference_and_error(spec.name)
                remaining[spec.name] = _placed_like(self.errors[spec.name], whole - as_received(whole))
        return remaining

    @torch.no_grad()
    def take(self, spec: TensorSpec, whole: Tensor) -> None:
        """Take the global value of a parameter from rank 0. Collective on several ranks.

        Args:
            spec: of the parameter.
            whole: the full tensor on rank 0, on the CPU; elsewhere one of the same shape, whose values do not count.
        """
        target = self.tensors[spec.name]
        if isinstance(target, DTensor):
            target.to_local().copy_(_local(_placed_like(target, whole)))
            return
        target.copy_(whole)
        if collectives.initialized():
            dist.broadcast(target, src=0)

    @torch.no_grad()
    def adopt(self, specs: Specs, share: float = 0.0) -> None:
        """Move the model's parameters to the global ones: ``share · own + (1 − share) · global``."""
        own = [_local(self._parameters[spec.name]) for spec in specs]
        globals_ = [_local(self.tensors[spec.name]) for spec in specs]
        if share == 0:
            torch._foreach_copy_(own, globals_)
        else:
            torch._foreach_lerp_(own, globals_, 1 - share)


def _placed_like(target: Tensor, whole: Tensor) -> Tensor:
    """Rank 0's ``whole``, sharded as ``target``."""
    if not isinstance(target, DTensor):
        return whole
    return distribute_tensor(whole.to(target.device_mesh.device_type), target.device_mesh, target.placements)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
