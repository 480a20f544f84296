"""Lightning's order: the event, arguments and condition of each method's call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dalsegno.events.table import Event
from dalsegno.interop.table_adapter import Row

ROWS = (
    Row(Event.BEFORE_LOAD, "setup", "stage"),
    Row(Event.TRAIN_BEGIN, "setup", "stage"),  # where no checkpoint was looked for, or for a callback added since
    Row(Event.TRAIN_BEGIN, "on_fit_start"),
    Row(Event.TRAIN_BEGIN, "on_train_start"),
    Row(Event.EPOCH_BEGIN, "on_train_epoch_start"),
    Row(Event.MICROBATCH_BEGIN, "on_train_batch_start", "batch batch_idx"),
    Row(Event.BEFORE_FORWARD, "on_validation_batch_start", "batch val_batch_idx dataloader_idx", "validating"),
    Row(Event.BEFORE_BACKWARD, "on_before_backward", "loss"),
    Row(Event.AFTER_BACKWARD, "on_after_backward"),
    Row(Event.MICROBATCH_END, "on_train_batch_end", "outputs batch batch_idx", "more follow"),
    Row(Event.GRADIENTS_READY, "on_before_optimizer_step", "optimizer"),
    Row(Event.BEFORE_ZERO_GRAD, "on_before_zero_grad", "optimizer"),
    Row(Event.STEP_END, "on_train_batch_end", "outputs batch batch_idx"),
    Row(Event.EVALUATE_BEGIN, "on_validation_start", when="a validation begins"),
    Row(Event.EVALUATE_BEGIN, "on_validation_epoch_start", when="a validation begins"),
    Row(Event.PREDICTION_STEP, "on_validation_batch_end", "outputs batch val_batch_idx dataloader_idx"),
    Row(Event.LOG_STEP, "on_validation_epoch_end", when="the last set is logged"),  # what it logs is in that record
    Row(Event.EVALUATE, "on_validation_end", when="a validation ends"),
    Row(Event.EPOCH_END, "on_train_epoch_end"),
    Row(Event.EXCEPTION, "on_exception", "exception"),
    Row(Event.TRAIN_END, "on_train_end", when="the fit ends well"),
    Row(Event.TRAIN_END, "on_fit_end", when="the fit ends well"),
    Row(Event.TRAIN_END, "teardown", "stage"),
)

VALUES: Mapping[str, Callable[[Any, Any], Any]] = {
    "trainer": lambda shared, ctx: shared.trainer,
    "pl_module": lambda shared, ctx: shared.module,
    "stage": lambda shared, ctx: "fit",
    "batch": lambda shared, ctx: shared.batch,
    "outputs": lambda shared, ctx: _detached(shared.outputs),
    "batch_idx": lambda shared, ctx: shared.batches - 1,
    "val_batch_idx": lambda shared, ctx: shared.val_batch,
    "dataloader_idx": lambda shared, ctx: shared.set_index,
    "loss": lambda shared, ctx: ctx.outputs["loss"],
    "optimizer": lambda shared, ctx: ctx.optimizer,
    "exception": lambda shared, ctx: ctx.exception,
}


def _detached(outputs: Any) -> Any:
    """Return the outputs with their loss as Lightning passes it: without gradient."""
    return {**outputs, "loss": outputs["loss"].detach()} if "loss" in outputs else outputs


CONDITIONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "validating": lambda shared, ctx: shared.validating,
    "a validation begins": lambda shared, ctx: shared.begins_validation,
    "the last set is logged": lambda shared, ctx: ctx.kind == "eval" and shared.is_last_set,
    "a validation ends": lambda shared, ctx: ctx.is_last,
    "more follow": lambda shared, ctx: not ctx.is_last,
    "the fit ends well": lambda shared, ctx: shared.ends_well,
}

_OTHER_LOOPS = ("test", "test_epoch", "test_batch", "predict", "predict_epoch", "predict_batch")

SILENT = (
    "on_save_checkpoint",
    "on_load_checkpoint",
    "on_sanity_check_start",
    "on_sanity_check_end",
    *(f"on_{what}_{end}" for what in _OTHER_LOOPS for end in ("start", "end")),
)
"""The first two are called with the checkpoint; the others never, for dalsegno has no such parts."""
