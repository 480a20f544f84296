"""Forgather's differences from Hugging Face: which calls its callbacks get, and which numbers their records contain.

Its trainer reports an evaluation by ``on_evaluate`` alone. A record of training has the tokens of its interval, the
total in ``total_tokens``, the root mean square of the interval's gradient norms, the learning rate of the next step,
``total_flos``, and each rank's peak memory as a list. ``on_train_metrics(loss=, grad_norm=, tokens=)`` comes before the
step is counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

import torch

from dalsegno.events.callback import Answer, Binder, Callback
from dalsegno.events.contexts import Context, LogContext, MetricsContext, StepEndContext
from dalsegno.events.table import Event
from dalsegno.stateful.schema import Count, Must

from .calls import ADDED, WRAPPERS, Call, Invoke, Wrapper, Wrappers, direct, sharing
from .shared_state import RANK_PEAK_MEM, SharedRecord, record_of


class IntervalState(TypedDict):
    squares: Annotated[float, Must("0 or more", lambda squares: not squares < 0)]
    norms: Count
    tokens: Count


class Interval(Callback):
    """The interval since the last record, shared by all of Forgather's callbacks in one run."""

    name = "forgather"
    sets_control_flags = False
    state_schema = IntervalState

    def __init__(self, context: Context) -> None:
        self.record = SharedRecord(context.state, self.record_of)
        self._squares: float | torch.Tensor = 0.0  # sum of the squared gradient norms, on their device
        self._norms = 0
        self._tokens = 0  # of the run at the last record
        self._record: dict[str, Any] = {}  # what the newest record of training has in place of dalsegno's numbers

    def on_step_end(self, ctx: StepEndContext) -> None:
        norm = ctx.unread_grad_norm
        if norm is not None:
            self._squares = self._squares + torch.as_tensor(norm, dtype=torch.float64).square()
            self._norms += 1

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind != "train":
            return
        self._record = {"total_flos": ctx.state.total_flos}
        if "peak_mem" in ctx.logs:
            self._record["peak_mem"] = ctx.logs.get(RANK_PEAK_MEM, [ctx.logs["peak_mem"]])
        if self._norms:
            self._record["grad_norm"] = math.sqrt(float(self._squares) / self._norms)
        if "tokens" in ctx.logs:
            total = ctx.logs["tokens"]
            self._record |= {"tokens": total - self._tokens, "total_tokens": total}
            self._tokens = total
        if "learning_rate" in ctx.logs:
            self._record["learning_rate"] = float(ctx.optimizer.param_groups[0]["lr"])
        self._squares, self._norms = 0.0, 0

    def record_of(self, ctx: LogContext) -> dict[str, Any]:
        """Return a copy of the record, with Forgather's numbers."""
        return record_of(ctx) | (self._record if ctx.kind == "train" else {})

    def state_dict(self) -> IntervalState:
        return {"squares": float(self._squares), "norms": self._norms, "tokens": self._tokens}

    def load_state_dict(self, state: IntervalState) -> None:
        self._squares, self._norms, self._tokens = state["squares"], state["norms"], state["tokens"]


def unless_evaluation(call: Call) -> Call:
    return lambda adapted, ctx: None if ctx.kind == "eval" else call(adapted, ctx)


def with_interval_record(invoke: Invoke, binder: Binder) -> Call:
    return unless_evaluation(sharing(binder.shared(Interval).record, invoke))


def with_mutable_interval_record(invoke: Invoke, binder: Binder) -> Call:
    """Call with a copy of the record; what the method adds or changes is logged."""
    interval = binder.shared(Interval)

    def call(adapted: Any, ctx: LogContext) -> Answer:
        logs = interval.record_of(ctx)
        before = dict(logs)
        answer = invoke(adapted, ctx, logs=logs)
        ctx.logs.update({name: value for name, value in logs.items() if value is not before.get(name, _ABSENT)})
        return answer

    return unless_evaluation(call)


def before_count(invoke: Invoke, binder: Binder) -> Call:
    def call(adapted: Any, ctx: MetricsContext) -> Answer:
        before, metrics = ctx.copy(), ctx.metrics
        before.state.global_step -= 1
        given = {"loss": metrics["loss"], "grad_norm": metrics.get("grad_norm"), "tokens": metrics.get("tokens", 0)}
        return invoke(adapted, before, **given)

    return call


_ABSENT = object()

FORGATHER: Wrappers = {
    **WRAPPERS,
    (Event.LOG_STEP, "on_log_step"): with_mutable_interval_record,
    (Event.LOG, "on_log"): with_interval_record,
    (Event.TRAIN_METRICS, "on_train_metrics"): before_count,
    (Event.TRAIN_METRICS, "on_step_end"): direct,  # in place of STEP_END, if the callback has both methods
}

FORGATHER_ADDED: Mapping[Wrapper, Sequence[str]] = {
    **ADDED,
    with_mutable_interval_record: ("logs",),
    with_interval_record: ("logs",),
    before_count: ("loss", "grad_norm", "tokens"),
}
