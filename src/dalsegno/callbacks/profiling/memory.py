"""PeakMemory, MemoryMonitor, GPUMonitor, TraceMalloc: what a rank uses of its process's memory and of its device."""

from __future__ import annotations

import logging
import math
import os
import statistics
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dalsegno.callbacks.argument_checks import flag, whole
from dalsegno.callbacks.loggers.tensorboard import check_rewound, checked_writer
from dalsegno.callbacks.printing import STDOUT
from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.errors import ConfigurationError
from dalsegno.events import FlaglessCallback, contexts
from dalsegno.system.imports import require_extra
from dalsegno.system.machine import peak_resident_memory

logger = logging.getLogger("dalsegno")


def peak_memory(device: torch.device) -> int:
    """Return the peak so far in bytes: allocated on the device, if torch counts that; else of this process."""
    peak = accelerator.max_memory_allocated(device)
    return peak_resident_memory() if peak is None else peak


class PeakMemory(FlaglessCallback):
    """Prints the peak memory of each rank's process when training ends.

    On CUDA, the memory that PyTorch has allocated on the model's device; elsewhere the process's resident memory. No
    counter is reset, since other code may read it.

    Args:
        summary_writer: rank 0 writes ``peak-mem/rank-0`` and so on to it, in bytes, with each training record.
        show_details: also print torch's summary of each device's memory (CUDA).
        do_log: add ``rank_peak_mem`` to each training record: a list of each rank's bytes.
        enable_memory_snapshot: record allocations with their stacks (CUDA), and write them at the end, for
            https://pytorch.org/memory_viz, into ``output_dir``. Slows training.
        file_prefix: prefix of the snapshots: ``<prefix>-rank-00000.pickle``. dalsegno never reads one.
    """

    def __init__(
        self,
        summary_writer: Any = None,
        show_details: bool = False,
        do_log: bool = False,
        enable_memory_snapshot: bool = False,
        file_prefix: str = "memory_snapshot",
    ) -> None:
        if not isinstance(file_prefix, str) or not file_prefix or "/" in file_prefix:
            raise ConfigurationError(f"PeakMemory: file_prefix={file_prefix!r}; needs a file's name, without folders")
        self.summary_writer = checked_writer("PeakMemory", summary_writer, "add_scalar")
        self.show_details = flag("PeakMemory", "show_details", show_details)
        self.do_log = flag("PeakMemory", "do_log", do_log)
        self.enable_memory_snapshot = flag("PeakMemory", "enable_memory_snapshot", enable_memory_snapshot)
        self._file_prefix = file_prefix
        self._device = torch.device("cpu")
        self._peaks: list[int] = []  # of all ranks, as of the last record

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return collectives.rank()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return collectives.world_size()

    @property
    def enabled(self) -> bool:
        """Whether the memory is that of an accelerator; else it is the process's."""
        return self._device.type != "cpu"

    @property
    def max_allocated(self) -> int:
        """Peak of this rank so far, in bytes."""
        return peak_memory(self._device)

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        check_rewound("PeakMemory", self.summary_writer)
        self._device = device_of(ctx.model)
        self._peaks = []
        if self.enable_memory_snapshot and accelerator.can_record_allocations(self._device):
            accelerator.record_allocations(100_000)
        elif self.enable_memory_snapshot:
            logger.warning("PeakMemory: enable_memory_snapshot needs a model on CUDA; this one is on %s", self._device)

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind not in ("train", "final"):
            return
        of_ranks = collectives.gather_floats([float(self.max_allocated)], "PeakMemory")
        self._peaks = [int(peak) for (peak,) in of_ranks]
        if self.do_log and ctx.kind == "train":
            ctx.logs["rank_peak_mem"] = self._peaks

    def on_log(self, ctx: contexts.LogContext) -> None:
        if self.summary_writer is not None and ctx.kind == "train" and collectives.rank() == 0:
            for rank, peak in enumerate(self._peaks):
                self.summary_writer.add_scalar(f"peak-mem/rank-{rank}", peak, ctx.state.global_step)

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        here = collectives.rank()
        peaks = self._peaks if ctx.reason != "exception" else []  # the other ranks may be gone
        if here == 0 or not peaks:
            for rank, peak in enumerate(peaks) if peaks else [(here, self.max_allocated)]:
                STDOUT.say(f"peak memory of rank {rank}: {peak / 2**30:.3f} GiB")
        if self.show_details and (summary := accelerator.memory_summary(self._device)) is not None:
            STDOUT.say(summary)
        if self.enable_memory_snapshot and accelerator.can_record_allocations(self._device):
            path = ctx.args.directory / f"{self._file_prefix}-rank-{here:05d}.pickle"
            accelerator.dump_allocations(path)
            accelerator.record_allocations(None)


_CUDA = {
    "memory/active": "active_bytes.all.current",
    "memory/active_peak": "active_bytes.all.peak",
    "memory/reserved": "reserved_bytes.all.current",
    "memory/reserved_peak": "reserved_bytes.all.peak",
    "memory/retries": "num_alloc_retries",
    "memory/ooms": "num_ooms",
}
"""Names in a record, and in ``torch.cuda.memory_stats``."""


class MemoryMonitor(FlaglessCallback):
    """Logs GPU memory in each training record (bytes in use and reserved, allocator retries), the maximum over ranks:

    - ``memory/active``, ``memory/active_peak``: in use by tensors, or freed while a stream still uses it.
    - ``memory/reserved``, ``memory/reserved_peak``: reserved on the device by PyTorch's allocator.
    - ``memory/retries``: number of times the allocator emptied its cache to find memory.
    - ``memory/ooms``: number of times that still failed.

    These are for devices whose allocator counts them, as ``torch.cuda.memory_stats`` defines them. Elsewhere there are
    the process's ``memory/resident`` and ``memory/resident_peak``. Peaks and counts are since the process began: no
    counter is reset, since other code may read it.
    """

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind == "train":
            here = _in_use(device_of(ctx.model))
            most = collectives.all_reduce_max(list(here.values()), "MemoryMonitor")
            ctx.logs |= dict(zip(here, most, strict=True))


def _in_use(device: torch.device) -> dict[str, int]:
    if stats := accelerator.memory_stats(device):
        return {name: int(stats.get(key, 0)) for name, key in _CUDA.items()}
    resident = _resident()  # the kernel updates the peak later, so this may exceed it
    return {"memory/resident": resident, "memory/resident_peak": max(resident, peak_memory(device))}


def _resident() -> int:
    """Return the resident bytes of this process; the peak where the system does not report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_memory(torch.device("cpu"))
    return pages * os.sysconf("SC_PAGE_SIZE")


_OF_GPU: dict[str, tuple[Callable[[torch.device], float], Callable[[list[float]], float]]] = {
    "gpu/utilization": (accelerator.utilization, statistics.fmean),
    "gpu/power": (accelerator.power, statistics.fmean),
    "gpu/temperature": (accelerator.temperature, max),
}
"""How a rank measures each, and how those of all ranks become one."""


class GPUMonitor(FlaglessCallback):
    """Logs how busy and how hot the GPUs are, and what they draw, in each training record:

    - ``gpu/utilization``: percent of the time in which a kernel ran, the mean over ranks.
    - ``gpu/power``: watts of a GPU, the mean over ranks.
    - ``gpu/temperature``: degrees Celsius of the hottest one.

    They are what NVIDIA's driver has measured last, over up to a second, as ``nvidia-smi`` shows it. What it does not
    report is left out. On other devices nothing is logged, which a warning says.
    """

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        device = device_of(ctx.model)
        if not accelerator.is_nvidia(device):
            logger.warning("GPUMonitor: logs nothing, since the model is on %s, not on an NVIDIA GPU", device)
            return
        require_extra("nvidia", "pynvml", "GPUMonitor")
        reported = {name: _reported(measure, device) for name, (measure, _) in _OF_GPU.items()}
        if missing := [name for name, number in reported.items() if math.isnan(number)]:
            logger.warning("GPUMonitor: the driver of %s does not report %s", device, ", ".join(missing))

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind == "train":
            here = [_reported(measure, device_of(ctx.model)) for measure, _ in _OF_GPU.values()]
            by_rank = collectives.gather_floats(here, "GPUMonitor")
            for (name, (_, together)), numbers in zip(_OF_GPU.items(), zip(*by_rank, strict=True), strict=True):
                if known := [number for number in numbers if not math.isnan(number)]:
                    ctx.logs[name] = together(known)


def _reported(measure: Callable[[torch.device], float], device: torch.device) -> float:
    """NaN for what the driver does not report."""
    if not accelerator.is_nvidia(device):
        return math.nan
    from pynvml import NVMLError

    try:
        return measure(device)
    except (NVMLError, RuntimeError):  # the latter is torch's, of a part of a GPU
        return math.nan


class TraceMalloc(FlaglessCallback):
    """Prints, every ``every`` steps, the lines of code whose memory has grown the most since training began.

    Python's tracer (``tracemalloc``) traces what Python allocates: objects, but not the storage of tensors. It slows
    Python down by a factor of two to four. A tracer that is already running is left running.

    Args:
        every: steps between tables.
        lines: number of lines of code in a table.
        frames: number of frames stored per allocation; the table shows the innermost. More frames cost memory.
    """

    ranks = "zero"

    def __init__(self, every: int = 100, lines: int = 10, frames: int = 1) -> None:
        self._every = whole("TraceMalloc", "every", every)
        self._lines = whole("TraceMalloc", "lines", lines)
        self._frames = whole("TraceMalloc", "frames", frames)
        self._first: tracemalloc.Snapshot | None = None
        self._is_mine = False

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self._is_mine = not tracemalloc.is_tracing()
        if self._is_mine:
            tracemalloc.start(self._frames)
        self._first = None

    def on_step_done(self, ctx: contexts.StepDoneContext) -> None:
        if self._first is None:  # after the leg's first step, whose allocations happen once
            self._first = _snapshot()
        elif ctx.step % self._every == 0:
            self._print(ctx.step, self._first)

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        self._first = None
        if self._is_mine:
            tracemalloc.stop()

    def _print(self, step: int, first: tracemalloc.Snapshot) -> None:
        grown = [each for each in _snapshot().compare_to(first, "lineno") if each.size_diff > 0]
        grown.sort(key=lambda each: -each.size_diff)
        STDOUT.say(f"memory of Python at step {step}: {tracemalloc.get_traced_memory()[0] / 2**20:.1f} MiB")
        for each in grown[: self._lines]:
            grown_by = f"{each.size_diff / 2**10:+10.1f} KiB  {each.count_diff:+8d} objects"
            STDOUT.say(f"  {grown_by}  {each.traceback[0].filename}:{each.traceback[0].lineno}")


def _snapshot() -> tracemalloc.Snapshot:
    own = [tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__)]
    return tracemalloc.take_snapshot().filter_traces(own)
