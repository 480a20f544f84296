"""MemoryMonitor: what memory each record's step has left in use, and how hard it was to come by."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import LogContext, TrainBeginContext

from .default_metrics import peak_memory

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
    """Adds memory to each record of training, in bytes, of the rank that has the most of each:

    - ``memory/active``, ``memory/active_peak``: in use by tensors, or freed but still awaited by a stream.
    - ``memory/reserved``, ``memory/reserved_peak``: taken from the device by PyTorch's allocator.
    - ``memory/retries``: how often the allocator had to empty its cache to find memory: more than none, and growing,
      means fragmentation or too large a batch, and costs speed.
    - ``memory/ooms``: how often it found none even so.

    These are of CUDA, as ``torch.cuda.memory_stats`` defines them; peaks and counts are since the process began, since
    no counter is reset: others read them too. Elsewhere there are ``memory/resident`` and ``memory/resident_peak``
    of the process. One small reduction a record; the device is not waited for.
    """

    makes_wishes = False

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
        if self._device.type == "cuda":
            stats = torch.cuda.memory_stats(self._device)
            return {name: int(stats.get(key, 0)) for name, key in _CUDA.items()}
        resident = _resident()  # counted by the kernel on its own time: it may be ahead of the peak
        return {"memory/resident": resident, "memory/resident_peak": max(resident, peak_memory(self._device))}


def _resident() -> int:
    """Bytes of this process in memory now; the peak where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_memory(torch.device("cpu"))
    return pages * os.sysconf("SC_PAGE_SIZE")
