"""Peak memory of a rank, on its device."""

from __future__ import annotations

import torch

from dalsegno.system.memory import peak_resident_memory


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: allocated on the device, if torch counts that; else resident in this
    process."""
    measure = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return peak_resident_memory() if measure is None else int(measure(device))
