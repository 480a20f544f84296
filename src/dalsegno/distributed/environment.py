"""Environment: what determines the order in which numbers are summed, and so the last bits, without being a setting."""

from __future__ import annotations

from typing import Any

import torch

from . import accelerator, collectives
from .layout import Layout


def environment_of(device: torch.device, layout: Layout) -> dict[str, Any]:
    """Of this job, as plain values."""
    values = {"world_size": collectives.world_size(), "torch": str(torch.__version__)}
    if layout.mesh is not None:
        values["mesh"] = layout.dimensions
    if device.type != "cpu":
        return {**values, "processor": accelerator.name_of(device)}
    return {**values, "processor": _processor(), "threads": torch.get_num_threads()}


def _processor() -> str:
    """The instructions for which torch chooses its kernels: ``AVX2``, ``AVX512``, …"""
    return str(torch.backends.cpu.get_cpu_capability())
