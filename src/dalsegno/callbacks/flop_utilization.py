"""FlopUtilization: what the model does of what the hardware could do."""

from __future__ import annotations

import time

from dalsegno import ranks
from dalsegno.callback import Callback
from dalsegno.contexts import LogContext, RollbackContext, TrainBeginContext, TrainEndContext
from dalsegno.flops import TRAINING, CountedForward, known_peak
from dalsegno.pieces import device_of

from .arguments import number


class FlopUtilization(Callback):
    """Adds to each record of training:

    - ``flops_per_second``: the model's FLOPs on all ranks, per second of wall clock since the last record.
    - ``mfu``: that over the peak of all ranks' devices, where it is known.

    It is counted by samples, so it is there for models of every kind. The forward pass is counted once a leg, by
    torch's own counter, and taken three times (:data:`dalsegno.flops.TRAINING`); samples of other sizes than the first
    ones are taken for the same. A compiled model cannot be counted.

    Args:
        peak_hardware_flops: of one device, in FLOP/s, for the type of number that is trained in. None: what is known
            of the device, if the run is in bf16 or fp16.

    Raises:
        ConfigurationError: if that is not a number over 0.
    """

    makes_wishes = False

    def __init__(self, peak_hardware_flops: float | None = None) -> None:
        given = peak_hardware_flops
        self._given = None if given is None else number("FlopUtilization", "peak_hardware_flops", given, over=0)
        self._peak: float | None = None
        self._forward: CountedForward | None = None
        self._began = 0.0
        self._samples = 0

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self._peak = self._given or known_peak(device_of(ctx.model), ctx.args)
        self._forward = None if ctx.args.torch_compile else CountedForward(ctx.model)
        self._began, self._samples = time.perf_counter(), ctx.state.samples_seen

    def on_rollback(self, ctx: RollbackContext) -> None:
        self._began, self._samples = time.perf_counter(), ctx.state.samples_seen

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind != "train" or self._forward is None:
            return
        counted = TRAINING * self._forward.flops / self._forward.samples if self._forward.flops else 0.0
        told = ranks.gather_floats([time.perf_counter() - self._began, counted], "FlopUtilization")
        if not all(per_sample for _, per_sample in told):  # a pass has failed on some rank
            return
        seconds, per_sample = max(row[0] for row in told), sum(row[1] for row in told) / len(told)
        rate = per_sample * (ctx.state.samples_seen - self._samples) / seconds
        ctx.logs["flops_per_second"] = rate
        if self._peak is not None:
            ctx.logs["mfu"] = rate / (self._peak * ranks.world_size())
        self._began, self._samples = time.perf_counter(), ctx.state.samples_seen

    def on_train_end(self, ctx: TrainEndContext) -> None:
        if self._forward is not None:
            self._forward.close()
