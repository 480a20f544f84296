"""Peak memory of a rank, on its device."""

from __future__ import annotations

import torch

from dalsegno.distributed import accelerator
from dalsegno.system.memory import peak_resident_memory


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: allocated on the device, if torch counts that; else resident in this
    process."""
    peak = accelerator.max_memory_allocated(device)
    return peak_resident_memory() if peak is None else peak
