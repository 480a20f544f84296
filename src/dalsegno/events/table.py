"""Event table: all events, in the order in which a run fires them.

A *micro-batch* is one forward and backward pass, a *step* one optimizer update. ``state.global_step`` counts finished
steps: from ``on_step_begin`` to ``on_optimizer_step`` it still has the previous count.
"""

from __future__ import annotations

from enum import Enum

from . import contexts as ctx
from .contexts import Context


class Event(Enum):
    """Each event: the handler's name, its context, when it fires; in the order of firing: docs/reference/events.md."""

    handler: str
    context: type[Context]
    fires: str

    __hash__ = object.__hash__  # members are single objects; Enum's own is Python code

    INIT_END = "on_init_end", Context, "trainer built, nothing loaded"
    BEFORE_LOAD = (
        "on_before_load",
        ctx.BeforeLoadContext,
        "a checkpoint was selected and verified, or there is none (path None)",
    )
    LOAD = "on_load", ctx.LoadContext, "everything restored"
    TRAIN_BEGIN = "on_train_begin", ctx.TrainBeginContext, "after load, before the first batch"
    EPOCH_BEGIN = "on_epoch_begin", ctx.EpochContext, "before an epoch; once per epoch of the run"
    STEP_BEGIN = "on_step_begin", Context, "before a step's first micro-batch"
    MICROBATCH_BEGIN = "on_microbatch_begin", ctx.MicrobatchBeginContext, "batch loaded and on its device"
    BEFORE_FORWARD = "on_before_forward", ctx.BeforeForwardContext, "call arguments may be changed; in evaluation too"
    AFTER_FORWARD = "on_after_forward", ctx.AfterForwardContext, 'outputs["loss"] may be changed; in evaluation too'
    BEFORE_BACKWARD = "on_before_backward", ctx.BackwardContext, 'outputs["loss"] may be changed'
    AFTER_BACKWARD = "on_after_backward", ctx.BackwardContext, "this micro-batch's backward is done"
    MICROBATCH_END = "on_microbatch_end", ctx.MicrobatchEndContext, "gradients of this micro-batch added"
    GRADIENTS_READY = "on_gradients_ready", Context, "gradients complete: added, reduced, unscaled, not clipped"
    PRE_OPTIMIZER_STEP = "on_pre_optimizer_step", ctx.PreOptimizerStepContext, "gradients clipped, before the update"
    OPTIMIZER_STEP = "on_optimizer_step", Context, "weights updated, gradients not cleared yet"
    STEP_SKIPPED = "on_step_skipped", ctx.StepSkippedContext, "the scaler found a NaN or inf: no update, schedule held"
    BEFORE_ZERO_GRAD = "on_before_zero_grad", Context, "before gradients are cleared"
    AFTER_ZERO_GRAD = "on_after_zero_grad", Context, "gradients are cleared"
    BEFORE_SCHEDULER_STEP = "on_before_scheduler_step", ctx.SchedulerContext, "for each scheduler"
    AFTER_SCHEDULER_STEP = "on_after_scheduler_step", ctx.SchedulerContext, "for each scheduler"
    STEP_END = "on_step_end", ctx.StepEndContext, "step counted, gradients cleared; lr is the one this update used"
    TRAIN_METRICS = "on_train_metrics", ctx.MetricsContext, "every step, with global values; costs a reduction per step"
    LOG_STEP = "on_log_step", ctx.LogContext, "handlers may add to logs"
    LOG = "on_log", ctx.LogContext, "logs are final and equal on all ranks"
    EVALUATE_BEGIN = "on_evaluate_begin", ctx.EvaluateBeginContext, "before an evaluation set's first batch"
    PREDICTION_STEP = "on_prediction_step", ctx.PredictionStepContext, "after each evaluation batch"
    EVALUATE_END = "on_evaluate_end", ctx.EvaluateEndContext, "after the set's last batch, or when it is interrupted"
    EVALUATE = (
        "on_evaluate",
        ctx.EvaluateContext,
        "reduced metrics, already logged; the best metric is updated after it",
    )
    PREDICT = "on_predict", ctx.MetricsContext, "metrics of a prediction run"
    STEP_DONE = "on_step_done", ctx.StepDoneContext, "last event of a step: after logs and evaluation, before its save"
    BEFORE_SAVE = (
        "on_before_save",
        ctx.BeforeSaveContext,
        "last chance to change state or to cancel the save; then the state is captured",
    )
    SAVE = "on_save", ctx.SaveContext, "the checkpoint is durable and published"
    EPOCH_END = "on_epoch_end", ctx.EpochContext, "after an epoch's last step; once per epoch of the run"
    ROLLBACK = "on_rollback", ctx.RollbackContext, "returned to a checkpoint within a leg"
    EXCEPTION = "on_exception", ctx.ExceptionContext, "training ends with this exception"
    TRAIN_END = "on_train_end", ctx.TrainEndContext, "exactly once per leg, on every path"

    @classmethod
    def between(cls, first: Event, last: Event) -> list[Event]:
        """Return these events and those between them, in the order of firing."""
        events = list(cls)
        return events[events.index(first) : events.index(last) + 1]

    def __new__(cls, handler: str, context: type[Context], fires: str) -> Event:
        member = object.__new__(cls)
        member._value_ = handler
        member.handler, member.context, member.fires = handler, context, fires
        return member
