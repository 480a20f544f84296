"""Gradient scaler of a model that is sharded over several meshes: all ranks skip the same updates.

torch's scaler cannot unscale DTensors together with plain tensors, and reduces its finding over one mesh only.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dalsegno.distributed.layout import Layout
from dalsegno.distributed.sharded_tensors import dense


def grad_scaler(layout: Layout, device: torch.device) -> torch.amp.GradScaler:
    """The scaler that suits the layout."""
    return AgreedGradScaler(device.type) if layout.sharing > 1 else torch.amp.GradScaler(device.type)


class AgreedGradScaler(torch.amp.GradScaler):
    """Unscales this rank's shards; an update is skipped if any rank finds NaN or infinity."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        kinds: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kinds[parameter.grad.dtype].append(dense(parameter.grad))
        found = found_inf.clone()
        with torch.no_grad():
            for gradients in kinds.values():
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inv_scale.to(found.device))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return {found.device: found}
