"""Composer's order: the event and the condition of each method's call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dalsegno.events.table import Event
from dalsegno.interop.table_adapter import Row

ROWS = (
    Row(Event.INIT_END, "init"),
    Row(Event.BEFORE_LOAD, "init"),  # of a callback that was added since
    Row(Event.BEFORE_LOAD, "before_load"),
    Row(Event.LOAD, "after_load"),
    Row(Event.TRAIN_BEGIN, "init"),
    Row(Event.TRAIN_BEGIN, "fit_start"),
    Row(Event.EPOCH_BEGIN, "epoch_start"),
    Row(Event.STEP_BEGIN, "before_dataloader"),
    Row(Event.MICROBATCH_BEGIN, "after_dataloader", when="a step begins"),
    Row(Event.MICROBATCH_BEGIN, "batch_start", when="a step begins"),
    Row(Event.MICROBATCH_BEGIN, "before_train_batch", when="a step begins"),
    Row(Event.BEFORE_FORWARD, "before_forward", when="training"),
    Row(Event.BEFORE_FORWARD, "eval_batch_start", when="validating"),
    Row(Event.BEFORE_FORWARD, "eval_before_forward", when="validating"),
    Row(Event.AFTER_FORWARD, "after_forward", when="training"),
    Row(Event.AFTER_FORWARD, "eval_after_forward", when="validating"),
    Row(Event.BEFORE_BACKWARD, "before_loss"),  # the model computes its loss in the forward pass
    Row(Event.BEFORE_BACKWARD, "after_loss"),
    Row(Event.BEFORE_BACKWARD, "before_backward"),
    Row(Event.AFTER_BACKWARD, "after_backward"),
    Row(Event.GRADIENTS_READY, "after_train_batch"),
    Row(Event.STEP_END, "batch_end"),
    Row(Event.EVALUATE_BEGIN, "eval_standalone_start", when="an evaluation outside training begins"),
    Row(Event.EVALUATE_BEGIN, "eval_before_all", when="an evaluation begins"),
    Row(Event.EVALUATE_BEGIN, "eval_start"),
    Row(Event.PREDICTION_STEP, "eval_batch_end"),
    Row(Event.EVALUATE, "eval_end"),
    Row(Event.EVALUATE, "eval_after_all", when="an evaluation ends"),
    Row(Event.EVALUATE, "eval_standalone_end", when="an evaluation outside training ends"),
    Row(Event.STEP_DONE, "batch_checkpoint"),
    Row(Event.EPOCH_END, "epoch_end"),
    Row(Event.EPOCH_END, "epoch_checkpoint"),
    Row(Event.TRAIN_END, "fit_end", when="the fit ends well"),
    Row(Event.TRAIN_END, "close"),
    Row(Event.TRAIN_END, "post_close"),
)

VALUES: Mapping[str, Callable[[Any, Any], Any]] = {
    "state": lambda shared, ctx: shared.state,
    "logger": lambda shared, ctx: shared.logger,
}

CONDITIONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "a step begins": lambda shared, ctx: shared.is_first_microbatch,
    "training": lambda shared, ctx: not shared.validating,
    "validating": lambda shared, ctx: shared.validating,
    "an evaluation begins": lambda shared, ctx: shared.begins_validation,
    "an evaluation ends": lambda shared, ctx: ctx.is_last,
    "an evaluation outside training begins": lambda shared, ctx: shared.begins_validation and not shared.fitting,
    "an evaluation outside training ends": lambda shared, ctx: ctx.is_last and not shared.fitting,
    "the fit ends well": lambda shared, ctx: shared.ends_well,
}
