"""MemoryMonitor: memory in use at each record, and the allocator's retries."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import LogContext, TrainBeginContext

from .measures.memory import peak_memory

_CUDA = {
    "memory/active": "active_bytes.all.current",
    "memory/active_peak": "active_bytes.all.peak",
    "memory/reserved": "reserved_bytes.all.current",
    "memory/reserved_peak": "reserved_bytes.all.peak",
    "memory/retries": "num_alloc_retries",
    "memory/ooms": "num_ooms",
}
"""Names in a record, and in ``torch.cuda.memory_stats``."""


class MemoryMonitor(Callback):
    """Logs GPU memory in each training record (bytes in use and reserved, allocator retries), the maximum over ranks:

    - ``memory/active``, ``memory/active_peak``: in use by tensors, or freed while a stream still uses it.
    - ``memory/reserved``, ``memory/reserved_peak``: reserved on the device by PyTorch's allocator.
    - ``memory/retries``: number of times the allocator emptied its cache to find memory. A growing number means
      fragmentation or a batch that is too large, and slows training.
    - ``memory/ooms``: number of times that still failed.

    These are for devices whose allocator counts them, as ``torch.cuda.memory_stats`` defines them. Peaks and counts are
    since the process began: no counter is reset, since other code may read it. Elsewhere there are the process's
    ``memory/resident`` and ``memory/resident_peak``. Costs one small reduction per record, and does not wait for the
    device.
    """

    sets_control_flags = False

    def __init__(self) -> None:
        self._device = torch.device("cpu")

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self._device = device_of(ctx.model)

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind == "train":
            here = self._in_use()
            most = collectives.all_reduce_max(list(here.values()), "MemoryMonitor")
            ctx.logs |= dict(zip(here, most, strict=True))

    def _in_use(self) -> dict[str, int]:
        if stats := accelerator.memory_stats(self._device):
            return {name: int(stats.get(key, 0)) for name, key in _CUDA.items()}
        resident = _resident()  # the kernel updates the peak later, so this may exceed it
        return {"memory/resident": resident, "memory/resident_peak": max(resident, peak_memory(self._device))}


def _resident() -> int:
    """Return the resident bytes of this process; the peak where the system does not report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_memory(torch.device("cpu"))
    return pages * os.sysconf("SC_PAGE_SIZE")
