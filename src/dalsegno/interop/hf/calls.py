"""Which of their methods is called at which event, and what has to be done for it that our events do otherwise."""

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
    SaveContext,
)
from dalsegno.events.table import Event

from .shared_state import SharedState, record_of

Call = Callable[[Any, Any], Answer]
"""``(adapted, ctx)``"""


class Hand(Protocol):
    """Calls a method of theirs with what each event gives, and with what this one adds."""

    def __call__(self, adapted: Any, ctx: Any, /, **added: Any) -> Answer: ...


Way = Callable[[Hand, SharedState], Call]
"""How a method is called at an event."""

GIVEN = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")


def hand_of(function: Callable[..., Any], company: SharedState) -> Hand:
    """Everything that stays the same over a run is looked up here, once."""
    context, args, state, state_at = company.context, company.args, company.state, company.state_at
    live, model, processing_class = context.state, context.model, context.processing_class
    optimizer, lr_scheduler = context.optimizer, context.lr_scheduler
    train_dataloader = company.train_dataloader

    def hand(adapted: Any, ctx: Context, /, **added: Any) -> Answer:
        method = partial(function, **added) if added else function  # ** in the call itself costs every step
        answer: Answer = method(
            args,
            state if ctx.state is live else state_at(ctx.state),
            ctx.control,
            model=model,
            processing_class=processing_class,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            train_dataloader=train_dataloader,
            eval_dataloader=company.eval_dataloader,
        )
        return answer

    return hand


def plainly(hand: Hand, company: SharedState) -> Call:
    return hand


def unless_last(hand: Hand, company: SharedState) -> Call:
    def call(adapted: Any, ctx: MicrobatchEndContext) -> Answer:
        return None if ctx.is_last else hand(adapted, ctx)

    return call


def where_joined(hand: Hand, company: SharedState) -> Call:
    """If the leg begins inside of an epoch."""

    def call(adapted: Any, ctx: Context) -> Answer:
        return hand(adapted, ctx) if company.joined_epoch else None

    return call


def where_left(hand: Hand, company: SharedState) -> Call:
    """If the leg ends inside of an epoch: its last event but one is its final record."""

    def call(adapted: Any, ctx: LogContext) -> Answer:
        return hand(adapted, ctx) if ctx.kind == "final" and company.inside_epoch else None

    return call


def with_record(hand: Hand, company: SharedState) -> Call:
    def call(adapted: Any, ctx: LogContext) -> Answer:
        return hand(adapted, ctx, logs=record_of(ctx))

    return call


def with_open_record(hand: Hand, company: SharedState) -> Call:
    """What they put into it is logged."""

    def call(adapted: Any, ctx: LogContext) -> Answer:
        return hand(adapted, ctx, logs=ctx.logs)

    return call


def with_metrics(hand: Hand, company: SharedState) -> Call:
    def call(adapted: Any, ctx: EvaluateContext) -> Answer:
        return hand(adapted, ctx, metrics={**ctx.metrics, "epoch": ctx.state.epoch})

    return call


def when_saved(hand: Hand, company: SharedState) -> Call:
    """Their Trainer waits for a save: so the state is that of the step which is saved."""

    def call(adapted: Any, ctx: SaveContext) -> Answer:
        if ctx.step == ctx.state.global_step:
            return hand(adapted, ctx)
        then = ctx.copy()
        then.state.global_step = ctx.step
        return hand(adapted, then)

    return call


def without_the_end(hand: Hand, company: SharedState) -> Call:
    """For their ``DefaultFlowCallback``: it stops the training at the last step, which it comes to by itself here."""
    state = company.state

    def call(adapted: Any, ctx: Context) -> Answer:
        control = ctx.control
        was_stopping = control.should_training_stop
        answer = hand(adapted, ctx)
        if not was_stopping and state.global_step >= state.max_steps:
            control.should_training_stop = False
        return None if answer is control else answer

    return call


WAYS: Mapping[tuple[Event, str], Way] = {
    (Event.INIT_END, "on_init_end"): plainly,
    (Event.TRAIN_BEGIN, "on_train_begin"): plainly,
    (Event.TRAIN_BEGIN, "on_epoch_begin"): where_joined,
    (Event.EPOCH_BEGIN, "on_epoch_begin"): plainly,
    (Event.STEP_BEGIN, "on_step_begin"): plainly,
    (Event.MICROBATCH_BEGIN, "on_forward_backward_begin"): plainly,
    (Event.MICROBATCH_END, "on_forward_backward_end"): plainly,
    (Event.MICROBATCH_END, "on_substep_end"): unless_last,
    (Event.PRE_OPTIMIZER_STEP, "on_pre_optimizer_step"): plainly,
    (Event.OPTIMIZER_STEP, "on_optimizer_step"): plainly,
    (Event.STEP_END, "on_step_end"): plainly,
    (Event.TRAIN_METRICS, "on_train_metrics"): with_metrics,
    (Event.LOG_STEP, "on_epoch_end"): where_left,
    (Event.LOG_STEP, "on_log_step"): with_open_record,
    (Event.LOG, "on_log"): with_record,
    (Event.PREDICTION_STEP, "on_prediction_step"): plainly,
    (Event.EVALUATE, "on_evaluate"): with_metrics,
    (Event.PREDICT, "on_predict"): with_metrics,
    (Event.SAVE, "on_save"): when_saved,
    (Event.EPOCH_END, "on_epoch_end"): plainly,
    (Event.TRAIN_END, "on_train_end"): plainly,
}
"""In the order in which those at one event are called."""

ADDED: Mapping[Way, Sequence[str]] = {with_record: ("logs",), with_open_record: ("logs",), with_metrics: ("metrics",)}
"""What a way gives besides."""
