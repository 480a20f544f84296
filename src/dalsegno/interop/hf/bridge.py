"""Bridge: dalsegno's callbacks in Hugging Face's Trainer, and in those built on it.

::

    trainer = transformers.Trainer(..., callbacks=[Bridge([JsonLogger(), DivergenceDetector(patience=3)])])
    trainer.train(resume_from_checkpoint=True)

Hugging Face's loop calls the Bridge as follows; in brackets, what it fires only if it was given the trainer::

    on_train_begin → init_end, before_load, (states restored) load, train_begin
    on_epoch_begin → epoch_begin
    on_step_begin → step_begin
    (forward and backward) → [gradients_ready] → clipping
    on_pre_optimizer_step → pre_optimizer_step
    on_optimizer_step → optimizer_step, or step_skipped
    on_step_end → step_end, before_save if a save is due
    on_log → log_step, log
    (evaluation) [evaluate_begin, evaluate_end] on_log → log_step, log; on_evaluate → evaluate
    on_save → before_save unless it has fired, (states captured and written) save
    on_epoch_end → step_done, epoch_end
    on_train_end → train_end
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from transformers.trainer_callback import DefaultFlowCallback

from dalsegno.args import TrainingArguments
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import Callback
from dalsegno.events.dispatcher import check_supported
from dalsegno.events.registration import check_callbacks
from dalsegno.events.table import Event
from dalsegno.interop.leg import Leg, Surroundings, Unknown, fire
from dalsegno.policies.triggers import OnBest

from .inside import Inside

_NEVER = "Hugging Face's Trainer has no callback for; use dalsegno.Trainer, or another callback"
_GIVE_TRAINER = "trainer.add_callback(Bridge([…], trainer=trainer))"

UNSUPPORTED_EVENTS = dict.fromkeys(
    [
        Event.MICROBATCH_BEGIN,
        Event.BEFORE_FORWARD,
        Event.AFTER_FORWARD,
        Event.BEFORE_BACKWARD,
        Event.AFTER_BACKWARD,
        Event.MICROBATCH_END,
        Event.BEFORE_ZERO_GRAD,
        Event.AFTER_ZERO_GRAD,
        Event.BEFORE_SCHEDULER_STEP,
        Event.AFTER_SCHEDULER_STEP,
        Event.TRAIN_METRICS,
        Event.PREDICTION_STEP,
        Event.ROLLBACK,
        Event.EXCEPTION,
    ],
    _NEVER,
)
"""Events that the Bridge never fires. A callback that handles one of them raises EventNotFired."""

NEED_TRAINER = dict.fromkeys(
    [Event.GRADIENTS_READY, Event.EVALUATE_BEGIN, Event.EVALUATE_END],
    f"Hugging Face's Trainer has no callback for; give the Bridge the trainer: {_GIVE_TRAINER}",
)
"""Events that the Bridge fires only if it has the trainer."""


class Bridge(transformers.TrainerCallback):
    """A ``transformers.TrainerCallback`` that calls dalsegno's callbacks.

    Their states are saved as ``checkpoint-N/dalsegno/`` with each checkpoint, and restored before training begins;
    their logs, in ``output_dir``, are cut back to that checkpoint. A flag that a handler sets on any rank sets the flag
    of that name in Hugging Face's control on all ranks. A stop saves a checkpoint first, unless it is an abort or
    ``save_strategy="no"``.

    Args:
        callbacks: dalsegno's built-ins and your own.
        trainer: the trainer, to fire the events that it has no callback for, and for the loss and the gradient norm of
            each step. During ``train()`` its methods ``training_step`` and ``evaluation_loop``, and its accelerator's
            ``clip_grad_norm_``, are wrapped: ``trainer.add_callback(Bridge([EMA()], trainer=trainer))``.
        resume_from_checkpoint: the checkpoint that is given to ``train()``, if it is not in ``output_dir``: Hugging
            Face's Trainer does not tell callbacks.

    Raises:
        EventNotFired: for a callback that handles an event which the Trainer does not fire.
        ConfigurationError: for an object that is not a callback, or two callbacks with one key.
    """

    def __init__(
        self,
        callbacks: Iterable[object],
        *,
        trainer: transformers.Trainer | None = None,
        resume_from_checkpoint: str | Path | None = None,
    ) -> None:
        self._callbacks: list[Callback] = check_callbacks(callbacks)
        self._unsupported = UNSUPPORTED_EVENTS | ({} if trainer is not None else NEED_TRAINER)
        check_supported(self._callbacks, self._unsupported)
        self._trainer = trainer
        self._resume_from = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
        self._leg: Leg | None = None  # while training runs
        self._inside: Inside | None = None
        self._lr: float | None = None  # that the newest update used
        self._metrics: dict[str, Any] = {}  # of the final record
        self._is_stopping = False  # because a callback has requested it

    # -- begin and end ----------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.is_hyper_param_search:
            raise ConfigurationError("Bridge: a hyperparameter search trains many runs with one trainer; leave it out")
        self._expect_evaluations(args)
        leg = Leg(
            self._callbacks,
            Surroundings(
                args=settings_of(args, state),
                model=kwargs["model"],
                optimizer=_unwrapped(kwargs["optimizer"]),
                lr_scheduler=kwargs["lr_scheduler"],
                processing_class=kwargs["processing_class"],
                train_dataloader=kwargs["train_dataloader"],
                eval_dataloader=kwargs["eval_dataloader"],
            ),
            loop=state,
            locate=lambda step: Path(args.output_dir) / f"checkpoint-{step}",
            unsupported_events=self._unsupported,
        )
        _mirror(leg, args, state)
        leg.begin(self._resumed_checkpoint(args, state), _timeline(state), saves=args.save_strategy != "no")
        self._leg, self._metrics, self._is_stopping = leg, {}, False
        if self._trainer is not None:
            self._inside = Inside(self._trainer, leg)
        return self._passed_on(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        leg = self._followed(args, state)
        if leg is None:
            return
        if self._inside is not None:
            self._inside.close()
        self._leg = self._inside = None
        leg.finish()
        is_whole, is_aborted = state.global_step >= state.max_steps, leg.control.should_abort_without_save
        leg.end("aborted" if is_aborted else "finished" if is_whole else "stopped", self._metrics)

    # -- epochs and steps -------------------------------------------------------------------------------------------

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if (leg := self._followed(args, state)) is not None:
            leg.epoch_begin()
        return self._passed_on(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        leg = self._followed(args, state)
        if leg is None:
            return control
        if state.epoch % 1 == 0 or not control.should_training_stop:  # else training has stopped inside the epoch
            leg.epoch_end()
        return self._passed_on(control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        leg = self._followed(args, state)
        if leg is None:
            return
        due = _due_at_next_step(args, state, kwargs["train_dataloader"])
        leg.state.will_log, leg.state.will_evaluate, leg.state.will_save = (
            due.should_log,
            due.should_evaluate,
            due.should_save,
        )
        leg.step_begin()
        if self._inside is not None:
            self._inside.begin_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        leg = self._followed(args, state)
        if leg is None:
            return
        self._lr = float(kwargs["optimizer"].param_groups[0]["lr"])
        fire(leg.events.pre_optimizer_step, None if self._inside is None else self._inside.grad_norm)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        leg = self._followed(args, state)
        if leg is None:
            return
        if getattr(kwargs["optimizer"], "step_was_skipped", False):
            fire(leg.events.step_skipped, "the gradient scaler found NaN or infinity")
        else:
            fire(leg.events.optimizer_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        leg = self._followed(args, state)
        if leg is None:
            return control
        if self._inside is None:
            leg.step_end(_unknown("loss"), _unknown("grad_norm"), self._lr)
        else:
            leg.step_end(self._inside.loss, self._inside.grad_norm, self._lr)
        return self._passed_on(control, at_step=True)

    # -- records, evaluations, saves --------------------------------------------------------------------------------

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        leg = self._followed(args, state)
        if leg is None:
            return control
        logs = {name: value for name, value in kwargs["logs"].items() if name != "epoch"}  # records have it anyway
        kind = _kind_of(logs)
        if kind == "final":
            leg.finish()
            self._metrics = logs
        leg.record(logs, kind, self._evaluated_weights if kind == "eval" else None)
        return self._passed_on(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        leg, metrics = self._followed(args, state), kwargs["metrics"]
        if leg is None:
            return control
        fire(leg.events.evaluate, dict(metrics), _name_of(metrics), self._evaluated_weights)
        return self._passed_on(control)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        if (leg := self._followed(args, state)) is not None:
            fire(leg.events.predict, dict(metrics))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if (leg := self._followed(args, state)) is not None:
            leg.save(_timeline(state), is_best=state.best_global_step == state.global_step)
        return self._passed_on(control)

    @property
    def _evaluated_weights(self) -> str | None:
        return None if self._inside is None else self._inside.evaluated_weights

    # -- between the two --------------------------------------------------------------------------------------------

    def _followed(self, args: Any, state: Any) -> Leg | None:
        """The leg, with the trainer's present progress; None if training does not run."""
        if self._leg is not None:
            _mirror(self._leg, args, state)
        return self._leg

    def _passed_on(self, control: Any, *, at_step: bool = False) -> Any:
        """Set on the trainer's control what callbacks request, on all ranks alike. Collective."""
        leg = self._leg
        if leg is None:
            return control
        if control.should_save and not leg.control.should_abort_without_save:
            leg.announce_save()
        wishes = leg.requests(at_step=at_step)
        control.should_log |= wishes.log
        control.should_evaluate |= wishes.evaluate
        control.should_epoch_stop |= wishes.end_epoch
        control.should_save |= wishes.save
        if (wishes.stop or wishes.abort) and not self._is_stopping:
            self._is_stopping = control.should_training_stop = True
            control.should_save |= bool(leg.args.saving)
            leg.warn_stops()
        control.should_save &= not wishes.abort
        return control

    def _expect_evaluations(self, args: Any) -> None:
        waiting = [callback.key for callback in self._callbacks if callback.needs_evaluations]
        if waiting and args.eval_strategy == "no":
            raise ConfigurationError(f"{waiting[0]} needs evaluations: set eval_strategy in TrainingArguments")

    def _resumed_checkpoint(self, args: Any, state: Any) -> Path | None:
        if state.global_step == 0:
            return None
        path = self._resume_from or Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if not collectives.from_rank_zero(path.is_dir):
            raise ConfigurationError(
                f"training resumes at step {state.global_step}, and {path} does not exist; give the Bridge the path of "
                "the checkpoint: Bridge([…], resume_from_checkpoint=…)"
            )
        return path


def settings_of(args: Any, state: Any) -> TrainingArguments:
    """Hugging Face's settings as dalsegno's, as far as it has them. Strategies other than its own become ``"no"``."""
    strategies: dict[str, Any] = {
        name: strategy if (strategy := str(getattr(args, name).value)) in ("no", "steps", "epoch") else "no"
        for name in ("logging_strategy", "eval_strategy", "save_strategy")
    }
    same = (
        "output_dir",
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "bf16",
        "fp16",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "seed",
        "data_seed",
        "disable_tqdm",
        "run_name",
    )
    values: dict[str, Any] = {name: getattr(args, name) for name in same}
    values |= {name: int(getattr(state, name) or 0) for name in ("logging_steps", "eval_steps", "save_steps")}
    return TrainingArguments(
        **values,
        **strategies,
        max_steps=state.max_steps or -1,
        num_train_epochs=float(args.num_train_epochs),
        save_total_limit=args.save_total_limit or None,
        save=OnBest() if args.save_strategy == "best" else None,
    )


def _mirror(leg: Leg, args: Any, state: Any) -> None:
    """Copy the trainer's progress."""
    own = leg.state
    for name in ("global_step", "max_steps", "num_train_epochs", "num_input_tokens_seen", "total_flos", "best_metric"):
        setattr(own, name, getattr(state, name))
    own.epoch = state.epoch or 0.0
    own.best_global_step = state.best_global_step or 0
    own.best_model_checkpoint = state.best_model_checkpoint
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    own.samples_seen = state.global_step * batch


class _NextStep:
    """The trainer's state as it will be at the end of the step that begins."""

    def __init__(self, state: Any) -> None:
        self.global_step = state.global_step + 1
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def _due_at_next_step(args: Any, state: Any, loader: Any) -> transformers.TrainerControl:
    """What Hugging Face's own schedule will ask for at the end of the step that begins."""
    flow, due, then = DefaultFlowCallback(), transformers.TrainerControl(), _NextStep(state)
    flow.on_step_end(args, then, due)  # type: ignore[arg-type]
    try:
        batches = len(loader)
    except TypeError:  # of unknown length
        return due
    if then.global_step % max(-(-batches // args.gradient_accumulation_steps), 1) == 0:
        flow.on_epoch_end(args, then, due)  # type: ignore[arg-type]
    return due


def _timeline(state: Any) -> str:
    """Fingerprint of the records so far, which the trainer saves and restores with each checkpoint."""
    text = json.dumps(state.log_history, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _kind_of(logs: dict[str, Any]) -> str:
    if "train_runtime" in logs:
        return "final"
    if any(name.startswith("eval_") for name in logs):
        return "eval"
    return "train" if "loss" in logs else "user"


def _name_of(metrics: dict[str, Any]) -> str:
    """Name of the evaluation set: ``eval``, or its key if there are several, as in ``eval_small_runtime``."""
    prefix = next((name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")), "eval")
    return prefix.removeprefix("eval_")


def _unwrapped(optimizer: Any) -> Any:
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, whose hooks never run
        optimizer = optimizer.optimizer
    return optimizer


def _unknown(name: str) -> Unknown:
    what = f"ctx.{name} of on_step_end"
    return Unknown(what, f"Hugging Face's Trainer logs it, but passes it to no callback; {_GIVE_TRAINER}")
