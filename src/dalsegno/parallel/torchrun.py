"""The process group that torchrun announces in the environment."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from dalsegno import ranks
from dalsegno.errors import ConfigurationError


def join_ranks(use_cpu: bool) -> torch.device:
    """Join the process group that torchrun announces, if it does and nobody has; the device of this rank."""
    gpu = torch.cuda.is_available() and not use_cpu
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        # CPU tensors (a checkpoint's bookkeeping) go over gloo even where NCCL carries the gradients.
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def require_ranks(way: str) -> None:
    """
    Raises:
        ConfigurationError: if there is no process group to spread a model over.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError(
            f"parallel={way!r} needs a process group ({ranks.world_size()} rank now); start with torchrun, or use "
            "parallel='none'"
        )
