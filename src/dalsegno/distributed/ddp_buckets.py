"""DDP's buckets of gradients: whether the first step of a process rounds sums differently from all later steps.

After the first step, torch's reducer puts the gradients into other buckets, in the order in which they arrived. With
three or more ranks, the position of a gradient in its bucket determines the order in which its sum over the ranks is
rounded. ``distributed/parallel/ddp.py`` has a DDP without this.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def rebuilds_buckets(model: nn.Module) -> bool:
    """Whether ``model`` is in torch's DDP over three or more ranks, which rebuilds its buckets after the first step."""
    return any(
        isinstance(module, DistributedDataParallel)
        and (module.static_graph or not module.find_unused_parameters)  # the condition of torch's reducer
        and dist.get_world_size(module.process_group) > 2
        for module in model.modules()
    )
