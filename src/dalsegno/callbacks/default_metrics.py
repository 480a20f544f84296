"""DefaultMetrics: how fast the training runs, and how much memory it takes."""

from __future__ import annotations

import math
import resource
import sys
import time

import torch

from dalsegno import ranks
from dalsegno.callback import Callback
from dalsegno.contexts import Context, LogContext, RollbackContext, TrainBeginContext
from dalsegno.errors import ConfigurationError

FLOPS_PER_PARAMETER = 6
"""For each parameter and token: one multiplication and one addition forward, twice that backward. It is the estimate
C ≈ 6 N of Kaplan et al. 2020, "Scaling Laws for Neural Language Models" (arXiv:2001.08361, section 2.1); it leaves out
attention over long contexts, and takes embeddings for matrices that are multiplied."""


class DefaultMetrics(Callback):
    """Adds to each record of training:

    - ``tok_per_sec``: tokens of all ranks per second of wall clock since the last record, evaluations and saves in
      between included. Only where batches have ``input_ids``, whose elements are counted.
    - ``mfu``: the part of the hardware's peak that the model makes use of, 0 to 1: 6 FLOPs for each parameter and
      token (see :data:`FLOPS_PER_PARAMETER`) over the peak of all ranks' devices. Only with ``peak_hardware_flops``,
      where there is ``tok_per_sec``.
    - ``peak_mem``: bytes, of the rank that needs the most, since its process began. On CUDA what PyTorch has allocated
      at once on the model's device; elsewhere the process's resident memory.

    All ranks log the same values; they agree in one small reduction a record. The device is not waited for.

    Args:
        peak_hardware_flops: of one device, in FLOP/s, for the type of number that is trained in.

    Raises:
        ConfigurationError: if that is not a positive number.
    """

    def __init__(self, peak_hardware_flops: float | None = None) -> None:
        peak = peak_hardware_flops
        if peak is not None and not (_is_number(peak) and 0 < peak < math.inf):
            raise ConfigurationError(
                f"DefaultMetrics: peak_hardware_flops={peak!r}; needs FLOP/s of one device, a number over 0, or None"
            )
        self._peak_hardware_flops = peak
        self._flops_per_token = 0
        self._device = torch.device("cpu")
        self._began = 0
        self._tokens_before = 0

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        parameters = list(ctx.model.parameters())
        self._flops_per_token = FLOPS_PER_PARAMETER * sum(parameter.numel() for parameter in parameters)
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self._begin_interval(ctx)

    def on_rollback(self, ctx: RollbackContext) -> None:
        self._begin_interval(ctx)

    def _begin_interval(self, ctx: Context) -> None:
        self._began, self._tokens_before = time.perf_counter_ns(), ctx.state.num_input_tokens_seen

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind != "train":
            return
        now = time.perf_counter_ns()
        nanoseconds, peak_mem = ranks.agree_max([now - self._began, peak_memory(self._device)])
        self._began = now
        if "tokens" in ctx.logs:
            self._add_throughput(ctx.logs, nanoseconds)
        ctx.logs["peak_mem"] = peak_mem

    def _add_throughput(self, logs: dict[str, float], nanoseconds: int) -> None:
        # Where a leg begins between two records, the count that it begins with is an estimate, perhaps too high.
        tokens = max(0, logs["tokens"] - self._tokens_before)
        self._tokens_before = int(logs["tokens"])
        per_second = tokens * 1e9 / nanoseconds
        logs["tok_per_sec"] = per_second
        if self._peak_hardware_flops is not None:
            logs["mfu"] = per_second * self._flops_per_token / (self._peak_hardware_flops * ranks.world_size())


def peak_memory(device: torch.device) -> int:
    """The most bytes in use at once so far: allocated on a CUDA device, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024  # Linux counts in KiB


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
