"""Peak memory of a rank, on its device."""

from __future__ import annotations

import torch

from dalsegno.system.memory import peak_resident_memory


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: allocated on a CUDA device, else resident in this process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_memory()
