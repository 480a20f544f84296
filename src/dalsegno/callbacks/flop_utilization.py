"""FlopUtilization: the model's FLOP/s, and their fraction of the hardware's peak."""

from __future__ import annotations

from dalsegno.events.callback import Binder, Callback
from dalsegno.events.contexts import LogContext, TrainBeginContext
from dalsegno.events.table import Event
from dalsegno.state import Handler

from .measures.model_flops import ModelFlops
from .measures.peaks import GivenPeak


class FlopUtilization(Callback):
    """Logs the model's FLOPs per second, and their share of the hardware's peak, in each training record:

    - ``flops_per_second``: the model's FLOPs on all ranks, per second of wall-clock time since the last record.
    - ``mfu``: ``flops_per_second`` over the peak of all ranks' devices, where the peak is known; the same value that
      ``DefaultMetrics`` adds.

    Both leave out a leg's first step, in which kernels are chosen and compiled, if the record covers more steps. FLOPs
    are counted once per leg, from the shapes of a micro-batch (:mod:`dalsegno.callbacks.measures.flops`), forward and
    backward as far as needed. In other micro-batches each token counts the same, or each sample where batches have no
    ``input_ids``. For a model that cannot be counted, both are missing, and a warning gives the reason.

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
        self._given = GivenPeak("FlopUtilization", peak_hardware_flops, peak_flops_per_device, peak_flops_in_total)
        self._peak: float | None = None  # of all ranks' devices
        self._flops: ModelFlops | None = None

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        self._flops = binder.shared(ModelFlops)
        return super().bound_handlers(binder)

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self._peak = None if self._flops is None else self._flops.want(self._given, ctx, always=True)

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind != "train" or self._flops is None or self._flops.rate is None:
            return
        ctx.logs["flops_per_second"] = self._flops.rate
        if self._peak is not None:
            ctx.logs["mfu"] = self._flops.rate / self._peak
