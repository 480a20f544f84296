"""OLMo-core's order: the event, arguments and condition of each method's call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dalsegno.events.table import Event
from dalsegno.interop.table_adapter import Row

ROWS = (
    Row(Event.INIT_END, "post_attach"),
    Row(Event.BEFORE_LOAD, "post_attach"),  # of a callback that was added since
    Row(Event.LOAD, "post_checkpoint_loaded", "path"),
    Row(Event.TRAIN_BEGIN, "post_attach"),
    Row(Event.TRAIN_BEGIN, "pre_train"),
    Row(Event.EPOCH_BEGIN, "pre_epoch"),
    Row(Event.STEP_BEGIN, "pre_load_batch"),
    Row(Event.MICROBATCH_BEGIN, "pre_step", "batch", "a step begins"),
    Row(Event.GRADIENTS_READY, "pre_optim_step"),
    Row(Event.STEP_END, "post_train_batch"),
    Row(Event.STEP_END, "post_step"),  # what it records is of this step
    Row(Event.LOG_STEP, "pre_log_metrics", "step logs"),
    Row(Event.LOG, "log_metrics", "step logged"),
    Row(Event.SAVE, "post_checkpoint_saved", "path"),
    Row(Event.EPOCH_END, "post_epoch"),
    Row(Event.EXCEPTION, "on_error", "exception"),
    Row(Event.TRAIN_END, "post_train", when="the fit ends well"),
    Row(Event.TRAIN_END, "close"),
)

VALUES: Mapping[str, Callable[[Any, Any], Any]] = {
    "path": lambda shared, ctx: str(ctx.path),
    "batch": lambda shared, ctx: ctx.batch,
    "step": lambda shared, ctx: ctx.state.global_step,
    "logs": lambda shared, ctx: ctx.logs,
    "logged": lambda shared, ctx: dict(ctx.logs),
    "exception": lambda shared, ctx: ctx.exception,
}

CONDITIONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "a step begins": lambda shared, ctx: shared.is_first_microbatch,
    "the fit ends well": lambda shared, ctx: shared.ends_well,
}
