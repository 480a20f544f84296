"""DDP: a copy of the model on each rank, with averaged gradients (DistributedDataParallel)."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dalsegno.distributed.parallel.base import Parallel


class _SameBuckets(DistributedDataParallel):
    """DDP with the same buckets in each step.

    Torch's own rebuilds them after the first step (:mod:`dalsegno.distributed.parallel.ddp`). So a resumed run, whose
    next step is the first of its leg, would not take the same step as the run that was killed.
    """

    def __init__(self, model: nn.Module, devices: list[torch.device] | None) -> None:
        # The run broadcasts buffers at the end of each step, so that evaluations and checkpoints see them equal too.
        # Since 2.13 torch deprecates this argument, and says to keep it if the initial buffers may differ by rank:
        # forward_sync_buffers=False, its successor, overwrites them with rank 0's.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(model, device_ids=devices, broadcast_buffers=False)
        self.reducer._push_all_rebuilt_params()  # in the order below, as if they had come so
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Last to first, which is how gradients come where parameters are registered in the order of their use."""
        parameters, expect_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], expect_sparse[::-1]


class DataParallel(Parallel):
    """Every rank has the full model."""

    module: DistributedDataParallel

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model)
        devices = [device] if device.type != "cpu" else None
        self._left_out = [each for each in model.parameters() if not each.requires_grad]
        if self._left_out:
            self.complete_gradients = self._average_thawed
        self.module = _SameBuckets(model, devices)

    def synchronize(self, wanted: bool) -> None:
        self.module.require_backward_grad_sync = wanted  # as no_sync() does, without a context per micro-batch

    def _average_thawed(self) -> None:
        """Average the gradients of parameters that are trained only since the model was distributed: DDP's buckets do
        not have them."""
        for parameter in self._left_out:
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(gradient)
                parameter.grad = gradient.div_(dist.get_world_size())


# --- torch's own DDP, in a loop of the user's -----------------------------------------------------------------------

# After the first step, torch's reducer puts the gradients into other buckets, in the order in which they arrived. With
# three or more ranks, the position of a gradient in its bucket determines the order in which its sum over the ranks is
# rounded.


def rebuilds_buckets(model: nn.Module) -> bool:
    """Whether ``model`` is in torch's DDP over three or more ranks, which rebuilds its buckets after the first step."""
    return any(
        isinstance(module, DistributedDataParallel)
        and (module.static_graph or not module.find_unused_parameters)  # the condition of torch's reducer
        and dist.get_world_size(module.process_group) > 2
        for module in model.modules()
    )
