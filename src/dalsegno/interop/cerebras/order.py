"""Cerebras's order: the event, arguments and condition of each method's call. Within an event, from top to bottom."""

from __future__ import annotations

from dalsegno.events.table import Event

from .calls import Call, Enter, Forward, Leave, Log, Row, SetUp, Within, as_saved, before_count, in_training

_SET_UP = ("pre_setup", "setup", "post_setup")

LOG_METRICS = "log_metrics"
"""Of the library's loggers only; other callbacks may have a method of this name."""

ORDER: tuple[Row, ...] = (
    *(SetUp(Event.INIT_END, method) for method in _SET_UP),
    *(SetUp(Event.BEFORE_LOAD, method) for method in _SET_UP),  # for a callback that was added later
    Call(Event.BEFORE_LOAD, "on_before_load_checkpoint", "ckpt_path"),
    *(SetUp(Event.TRAIN_BEGIN, method) for method in _SET_UP),  # where no checkpoint is loaded
    Enter(Event.TRAIN_BEGIN, "on_enter_fit", "train_dataloader val_dataloaders loop", part="fit"),
    Call(Event.TRAIN_BEGIN, "on_fit_start", "train_dataloader val_dataloaders loop"),
    # a stretch of training
    Enter(Event.STEP_BEGIN, "on_enter_train", "train_dataloader loop loop_idx", "a stretch begins", part="train"),
    Call(Event.STEP_BEGIN, "on_train_start", "model train_dataloader loop loop_idx", "a stretch begins"),
    Call(Event.MICROBATCH_BEGIN, "on_train_batch_start", "model batch batch_idx"),
    Call(Event.MICROBATCH_BEGIN, "on_train_step_start", "model batch"),
    Call(Event.BEFORE_FORWARD, "on_validate_batch_start", "model batch val_batch_idx", "validating"),
    Call(Event.BEFORE_FORWARD, "on_validate_step_start", "model batch", "validating"),
    Forward(Event.BEFORE_FORWARD, "on_before_forward"),
    Call(Event.AFTER_FORWARD, "on_after_forward", "model outputs batch"),
    Call(Event.BEFORE_BACKWARD, "on_before_backward", "model outputs"),
    Call(Event.AFTER_BACKWARD, "on_after_backward", "model outputs"),
    Call(Event.MICROBATCH_END, "on_train_step_end", "model outputs batch", "more follow"),
    Call(Event.MICROBATCH_END, "on_train_batch_end", "model outputs batch batch_idx", "more follow"),
    Call(Event.GRADIENTS_READY, "on_before_optimizer_step", "model optimizer"),
    Call(Event.OPTIMIZER_STEP, "on_after_optimizer_step", "model optimizer"),
    Call(Event.BEFORE_ZERO_GRAD, "on_before_optimizer_zero_grad", "model optimizer"),
    Call(Event.AFTER_ZERO_GRAD, "on_after_optimizer_zero_grad", "model optimizer"),
    Call(Event.BEFORE_SCHEDULER_STEP, "on_before_scheduler_step", "model optimizer scheduler"),
    Call(Event.AFTER_SCHEDULER_STEP, "on_after_scheduler_step", "model optimizer scheduler"),
    Within(Event.STEP_END, "on_train_step_end", "model last_outputs last_batch", scope=before_count),
    Call(Event.STEP_END, "on_train_batch_end", "model last_outputs last_batch batch_idx"),
    Within(Event.EVALUATE_BEGIN, "on_train_end", "model loop loop_idx", "a stretch ends", scope=in_training),
    Leave(Event.EVALUATE_BEGIN, "on_enter_train", "train"),
    # a validation
    Enter(Event.EVALUATE_BEGIN, "on_enter_validate", "val_dataloader val_loop", part="validate"),
    Call(Event.EVALUATE_BEGIN, "on_validate_start", "model val_dataloader val_loop"),
    Call(Event.PREDICTION_STEP, "on_validate_step_end", "model outputs batch", "validating"),
    Call(Event.PREDICTION_STEP, "on_validate_batch_end", "model outputs batch val_batch_idx", "validating"),
    Call(Event.LOG_STEP, "on_validate_end", "model val_loop", "a validation ends"),  # its metrics are logged with it
    Leave(Event.EVALUATE, "on_enter_validate", "validate"),
    Log(Event.LOG, LOG_METRICS),
    Within(Event.SAVE, "on_after_save_checkpoint", "ckpt_path", scope=as_saved),
    # teardown; after an exception innermost first
    Leave(Event.EXCEPTION, "on_enter_validate", "validate"),
    Call(Event.EXCEPTION, "on_validate_exception", "exception", "validation broke"),
    Leave(Event.EXCEPTION, "on_enter_train", "train"),
    Call(Event.EXCEPTION, "on_train_exception", "exception", "training broke"),
    Leave(Event.EXCEPTION, "on_enter_fit", "fit"),
    Call(Event.EXCEPTION, "on_fit_exception", "exception", "the fit broke"),
    Leave(Event.TRAIN_END, "on_enter_validate", "validate"),  # of an interrupted validation, which the next leg repeats
    Call(Event.TRAIN_END, "on_train_end", "model loop loop_idx", "a stretch ends"),
    Leave(Event.TRAIN_END, "on_enter_train", "train"),
    Call(Event.TRAIN_END, "on_fit_end", "loop", "the fit ends well"),
    Leave(Event.TRAIN_END, "on_enter_fit", "fit"),
)

SILENT = (
    "finalize",
    "run_validation",
    "on_enter_validate_all",
    "on_after_save_trainer_state",
)
"""Never called: dalsegno has no restart by a supervisor, and no validation that callbacks run."""
