"""DefaultMetrics: throughput, model FLOPs utilization and peak memory."""

from __future__ import annotations

import time

import torch

from dalsegno.distributed.gathered import Gathered
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.events.callback import Binder, Callback
from dalsegno.events.contexts import Context, LogContext, RollbackContext, TrainBeginContext
from dalsegno.events.table import Event
from dalsegno.state import Handler

from .measures.memory import peak_memory
from .measures.model_flops import ModelFlops
from .measures.peaks import GivenPeak


class DefaultMetrics(Callback):
    """Logs speed, hardware utilization and peak memory in each training record:

    - ``tok_per_sec``: tokens of all ranks per second of wall-clock time since the last record, including evaluations
      and saves. Counts the elements of ``input_ids``; only logged where batches have them.
    - ``mfu``: model FLOPs utilization, the fraction of the hardware's peak that the model uses, 0 to 1: FLOPs per token
      (or per sample, without tokens), forward and backward, times tokens per second, over the peak of all ranks'
      devices (Chowdhery et al. 2022, "PaLM", arXiv:2204.02311, appendix B). A leg's first step, in which kernels are
      chosen and compiled, is left out if the record covers more steps. FLOPs are counted once per leg, from shapes
      (:mod:`dalsegno.callbacks.measures.flops`). Only logged where the peak is known and the model can be counted.
    - ``peak_mem``: bytes since the process began, of the rank with the most; on several ranks also ``rank_peak_mem``, a
      list of each rank's. On CUDA the maximum that PyTorch has allocated on the model's device; elsewhere the process's
      resident memory.

    All ranks log the same values: what they need of each other travels with the sums of the record. The callback does
    not wait for the device.

    Args:
        peak_hardware_flops: peak of the device in FLOP/s, for the training's dtype. On several ranks it is refused,
            since it could be the peak of one device or of all; use one of the next two.
        peak_flops_per_device: peak of each rank's device. None of the three: the known peak of the device, if the run
            is in bf16 or fp16.
        peak_flops_in_total: peak of all ranks' devices together.

    Raises:
        ConfigurationError: for a peak that is not a number over 0, for several of them, and before the first step for
            ``peak_hardware_flops`` on several ranks.
    """

    sets_control_flags = False

    def __init__(
        self,
        peak_hardware_flops: float | None = None,
        *,
        peak_flops_per_device: float | None = None,
        peak_flops_in_total: float | None = None,
    ) -> None:
        self._given = GivenPeak("DefaultMetrics", peak_hardware_flops, peak_flops_per_device, peak_flops_in_total)
        self._peak: float | None = None  # of all ranks' devices
        self._flops: ModelFlops | None = None
        self._device = torch.device("cpu")
        self._began = self._measured_at = 0
        self._tokens_before = 0
        self._of_ranks = Gathered(self._measure, "DefaultMetrics")

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        self._flops = binder.shared(ModelFlops)
        binder.gather_for_record(self._of_ranks)
        return super().bound_handlers(binder)

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self._device = device_of(ctx.model)
        self._peak = None if self._flops is None else self._flops.want(self._given, ctx)
        self._begin_interval(ctx)

    def on_rollback(self, ctx: RollbackContext) -> None:
        self._begin_interval(ctx)

    def _begin_interval(self, ctx: Context) -> None:
        self._began, self._tokens_before = time.perf_counter_ns(), ctx.state.num_input_tokens_seen
        self._of_ranks.forget()

    def _measure(self) -> list[float]:
        """Nanoseconds since the last record, and peak memory, of this rank."""
        self._measured_at = time.perf_counter_ns()
        return [float(self._measured_at - self._began), float(peak_memory(self._device))]

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind != "train":
            return
        by_rank = self._of_ranks.by_rank()
        nanoseconds = max(elapsed for elapsed, _ in by_rank)
        peaks = [int(peak) for _, peak in by_rank]
        self._began = self._measured_at
        if "tokens" in ctx.logs:
            self._add_throughput(ctx.logs, nanoseconds)
        if self._flops is not None and self._flops.rate is not None and self._peak is not None:
            ctx.logs["mfu"] = self._flops.rate / self._peak
        ctx.logs["peak_mem"] = max(peaks)
        if len(peaks) > 1:
            ctx.logs["rank_peak_mem"] = peaks

    def _add_throughput(self, logs: dict[str, float], nanoseconds: float) -> None:
        # A leg that begins between two records begins with an estimated count, which may be too high.
        tokens = max(0, logs["tokens"] - self._tokens_before)
        self._tokens_before = int(logs["tokens"])
        logs["tok_per_sec"] = tokens * 1e9 / nanoseconds
