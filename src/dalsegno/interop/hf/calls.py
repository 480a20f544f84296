"""Which of Hugging Face's methods is called at which event, and how the call differs from dalsegno's event."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from dalsegno.events.callback import Answer
from dalsegno.events.contexts import (
    Context,
    EvaluateContext,
    LogContext,
    MicrobatchEndContext,
)
from dalsegno.events.table import Event

from .shared_state import SharedState, record_of

Call = Callable[[Any, Any], Answer]
"""``(adapted, ctx)``"""


class Invoke(Protocol):
    """Calls a method with the arguments of every event, and with those that this event adds."""

    def __call__(self, adapted: Any, ctx: Any, /, **added: Any) -> Answer: ...


Wrapper = Callable[[Invoke, SharedState], Call]
"""Makes the call of a method at an event."""

KEYWORDS = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")


def invoke_with_event(function: Callable[..., Any], shared: SharedState) -> Invoke:
    """Return a caller of ``function``. Everything that is constant over a run is looked up once, here."""
    context, args, state, state_at = shared.context, shared.args, shared.state, shared.state_at
    live, model, processing_class = context.state, context.model, context.processing_class
    optimizer, lr_scheduler = context.optimizer, context.lr_scheduler
    train_dataloader = shared.train_dataloader

    def invoke(adapted: Any, ctx: Context, /, **added: Any) -> Answer:
        method = partial(function, **added) if added else function  # ** in the call below would cost time at every step
        answer: Answer = method(
            args,
            state if ctx.state is live else state_at(ctx.state),
            ctx.control,
            model=model,
            processing_class=processing_class,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            train_dataloader=train_dataloader,
            eval_dataloader=shared.eval_dataloader,
        )
        return answer

    return invoke


def direct(invoke: Invoke, shared: SharedState) -> Call:
    return invoke


def unless_last(invoke: Invoke, shared: SharedState) -> Call:
    def call(adapted: Any, ctx: MicrobatchEndContext) -> Answer:
        return None if ctx.is_last else invoke(adapted, ctx)

    return call


def if_epoch_joined(invoke: Invoke, shared: SharedState) -> Call:
    """Call if the leg begins inside an epoch."""

    def call(adapted: Any, ctx: Context) -> Answer:
        return invoke(adapted, ctx) if shared.joined_epoch else None

    return call


def if_epoch_left(invoke: Invoke, shared: SharedState) -> Call:
    """Call if the leg ends inside an epoch: at its final record, the last event but one."""

    def call(adapted: Any, ctx: LogContext) -> Answer:
        return invoke(adapted, ctx) if ctx.kind == "final" and shared.inside_epoch else None

    return call


def with_record(invoke: Invoke, shared: SharedState) -> Call:
    def call(adapted: Any, ctx: LogContext) -> Answer:
        return invoke(adapted, ctx, logs=record_of(ctx))

    return call


def with_mutable_record(invoke: Invoke, shared: SharedState) -> Call:
    """Call with the record itself: what the method adds to it is logged."""

    def call(adapted: Any, ctx: LogContext) -> Answer:
        return invoke(adapted, ctx, logs=ctx.logs)

    return call


def with_metrics(invoke: Invoke, shared: SharedState) -> Call:
    def call(adapted: Any, ctx: EvaluateContext) -> Answer:
        return invoke(adapted, ctx, metrics={**ctx.metrics, "epoch": ctx.state.epoch})

    return call


def ignoring_last_step(invoke: Invoke, shared: SharedState) -> Call:
    """For ``DefaultFlowCallback``, which stops training at the last step: dalsegno ends there by itself."""
    state = shared.state

    def call(adapted: Any, ctx: Context) -> Answer:
        control = ctx.control
        was_stopping = control.should_training_stop
        answer = invoke(adapted, ctx)
        if not was_stopping and state.global_step >= state.max_steps:
            control.should_training_stop = False
        return None if answer is control else answer

    return call


WRAPPERS: Mapping[tuple[Event, str], Wrapper] = {
    (Event.INIT_END, "on_init_end"): direct,
    (Event.TRAIN_BEGIN, "on_train_begin"): direct,
    (Event.TRAIN_BEGIN, "on_epoch_begin"): if_epoch_joined,
    (Event.EPOCH_BEGIN, "on_epoch_begin"): direct,
    (Event.STEP_BEGIN, "on_step_begin"): direct,
    (Event.MICROBATCH_BEGIN, "on_forward_backward_begin"): direct,
    (Event.MICROBATCH_END, "on_forward_backward_end"): direct,
    (Event.MICROBATCH_END, "on_substep_end"): unless_last,
    (Event.PRE_OPTIMIZER_STEP, "on_pre_optimizer_step"): direct,
    (Event.OPTIMIZER_STEP, "on_optimizer_step"): direct,
    (Event.STEP_END, "on_step_end"): direct,
    (Event.TRAIN_METRICS, "on_train_metrics"): with_metrics,
    (Event.LOG_STEP, "on_epoch_end"): if_epoch_left,
    (Event.LOG_STEP, "on_log_step"): with_mutable_record,
    (Event.LOG, "on_log"): with_record,
    (Event.PREDICTION_STEP, "on_prediction_step"): direct,
    (Event.EVALUATE, "on_evaluate"): with_metrics,
    (Event.PREDICT, "on_predict"): with_metrics,
    (Event.SAVE, "on_save"): direct,
    (Event.EPOCH_END, "on_epoch_end"): direct,
    (Event.TRAIN_END, "on_train_end"): direct,
}
"""Calls at the same event are made in this order."""

ADDED: Mapping[Wrapper, Sequence[str]] = {
    with_record: ("logs",),
    with_mutable_record: ("logs",),
    with_metrics: ("metrics",),
}
"""Keyword arguments that a wrapper adds."""
