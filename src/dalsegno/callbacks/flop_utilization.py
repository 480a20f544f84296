"""FlopUtilization: the model's FLOP/s, and their fraction of the hardware's peak."""

from __future__ import annotations

from dalsegno.events.callback import Binder, Callback
from dalsegno.events.contexts import LogContext, TrainBeginContext
from dalsegno.events.table import Event
from dalsegno.state import Handler

from .argument_checks import number
from .measures.model_flops import ModelFlops


class FlopUtilization(Callback):
    """Adds to each record of training:

    - ``flops_per_second``: the model's FLOPs on all ranks, per second of wall-clock time since the last record.
    - ``mfu``: ``flops_per_second`` over the peak of all ranks' devices, where the peak is known; the same value that
      ``DefaultMetrics`` adds.

    Both leave out a leg's first step, in which kernels are chosen and compiled, if the record covers more steps. FLOPs
    are counted once per leg, from the shapes of a micro-batch (:mod:`dalsegno.callbacks.measures.flops`), forward and
    backward as far as needed. In other micro-batches each token counts the same, or each sample where batches have no
    ``input_ids``. For a model that cannot be counted, both are missing, and a warning gives the reason.

    Args:
        peak_hardware_flops: peak of one device in FLOP/s, for the training's dtype. None: the known peak of the device,
            if the run is in bf16 or fp16.

    Raises:
        ConfigurationError: if ``peak_hardware_flops`` is not a number over 0.
    """

    sets_control_flags = False

    def __init__(self, peak_hardware_flops: float | None = None) -> None:
        given = peak_hardware_flops
        self._given = None if given is None else number("FlopUtilization", "peak_hardware_flops", given, over=0)
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
