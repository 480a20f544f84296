"""PeakMemory: the peak memory of each rank."""

from __future__ import annotations

import logging
from typing import Any

import torch

from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import LogContext, TrainBeginContext, TrainEndContext

from .argument_checks import flag, writer
from .measures.memory import peak_memory
from .rewound_writer import check_rewound

logger = logging.getLogger("dalsegno")


class PeakMemory(Callback):
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

    Raises:
        ConfigurationError: for an invalid value.
    """

    sets_control_flags = False

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
        self._writer = writer("PeakMemory", summary_writer, "add_scalar")
        self._show_details = flag("PeakMemory", "show_details", show_details)
        self._do_log = flag("PeakMemory", "do_log", do_log)
        self._snapshot = flag("PeakMemory", "enable_memory_snapshot", enable_memory_snapshot)
        self._file_prefix = file_prefix
        self._device = torch.device("cpu")
        self._peaks: list[int] = []  # of all ranks, as of the last record

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        check_rewound("PeakMemory", self._writer)
        self._device = device_of(ctx.model)
        self._peaks = []
        if self._snapshot and accelerator.can_record_allocations(self._device):
            accelerator.record_allocations(100_000)
        elif self._snapshot:
            logger.warning("PeakMemory: enable_memory_snapshot needs a model on CUDA; this one is on %s", self._device)

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind not in ("train", "final"):
            return
        self._peaks = [
            int(peak) for (peak,) in collectives.gather_floats([float(peak_memory(self._device))], "PeakMemory")
        ]
        if self._do_log and ctx.kind == "train":
            ctx.logs["rank_peak_mem"] = self._peaks

    def on_log(self, ctx: LogContext) -> None:
        if self._writer is not None and ctx.kind == "train" and collectives.rank() == 0:
            for rank, peak in enumerate(self._peaks):
                self._writer.add_scalar(f"peak-mem/rank-{rank}", peak, ctx.state.global_step)

    def on_train_end(self, ctx: TrainEndContext) -> None:
        here = collectives.rank()
        peaks = self._peaks if ctx.reason != "exception" else []  # the other ranks may be gone
        if here == 0 or not peaks:
            for rank, peak in enumerate(peaks) if peaks else [(here, peak_memory(self._device))]:
                print(f"peak memory of rank {rank}: {peak / 2**30:.3f} GiB", flush=True)
        if self._show_details and (summary := accelerator.memory_summary(self._device)) is not None:
            print(summary, flush=True)
        if self._snapshot and accelerator.can_record_allocations(self._device):
            path = ctx.args.directory / f"{self._file_prefix}-rank-{here:05d}.pickle"
            accelerator.dump_allocations(path)
            accelerator.record_allocations(None)
