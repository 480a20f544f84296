"""Bridge: dalsegno's callbacks in Hugging Face's Trainer, and in those built on it; theirs here: ``dialect``.

::

    trainer = transformers.Trainer(..., callbacks=[Bridge([JsonLogger(), DivergenceDetector(patience=3)])])
    trainer.train(resume_from_checkpoint=True)

Hugging Face's loop calls the Bridge as follows; in brackets, what it fires only if it was given the trainer::

    on_train_begin → init_end, before_load, (states restored) load, train_begin
    on_epoch_begin → epoch_begin
    on_step_begin → step_begin
    [microbatch_begin] → (forward and backward) → [gradients_ready] → clipping
    on_pre_optimizer_step → pre_optimizer_step
    on_optimizer_step → optimizer_step, or step_skipped
    on_step_end → step_end, before_save if a save is due
    on_log → log_step, log
    (evaluation) [evaluate_begin, evaluate_end] on_log → log_step, log; on_evaluate → evaluate
    on_save → before_save unless it has fired, (states captured and written) save
    on_epoch_end → step_done, epoch_end
    on_train_end → train_end; [after an exception: exception, train_end]
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from copy import copy
from functools import wraps
from pathlib import Path
from typing import Any

import transformers
from transformers.trainer_callback import DefaultFlowCallback, ExportableState

from dalsegno import state as run_state
from dalsegno.args import TrainingArguments
from dalsegno.data.loader import length_of, sample_count
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.events.table import Event
from dalsegno.interop.leg import FELT, INSIDE_THE_STEP, Leg, Unknown, checked, unwrapped_optimizer, wrap
from dalsegno.interop.states import FOLDER, samples_of_steps, states_in
from dalsegno.logs.repeats import RecordDifference
from dalsegno.policies.triggers import OnBest
from dalsegno.state import TrainerState
from dalsegno.witness import OnResume

logger = logging.getLogger("dalsegno")

_MARK = "dalsegno"
"""Name in ``stateful_callbacks`` of Hugging Face's state. No callback's class has it, so Hugging Face restores none."""

_GIVE_TRAINER = "trainer.add_callback(Bridge([…], trainer=trainer))"

UNSUPPORTED_EVENTS = dict.fromkeys(
    [*INSIDE_THE_STEP, Event.MICROBATCH_END],
    "Hugging Face's Trainer has no callback for; use dalsegno.Trainer, or another callback",
)
"""Events that the Bridge never fires. A callback that handles one of them raises EventNotFired."""

NEED_TRAINER = dict.fromkeys(
    [Event.MICROBATCH_BEGIN, Event.GRADIENTS_READY, Event.EVALUATE_BEGIN, Event.EVALUATE_END, Event.EXCEPTION],
    f"Hugging Face's Trainer has no callback for; give the Bridge the trainer: {_GIVE_TRAINER}",
)
"""Events that the Bridge fires only if it has the trainer."""

_UNKNOWN = [
    Unknown(
        f"ctx.{name} of on_step_end", f"Hugging Face's Trainer logs it, but passes it to no callback; {_GIVE_TRAINER}"
    )
    for name in ("loss", "grad_norm")
]

CAUSES = {
    "data": "Hugging Face's Trainer repeats them only with the same seed and without ignore_data_skip, and only if no "
    "random number is drawn to make a sample or a batch",
    "record": "the steps are equal, so a callback or the trainer has a state that no checkpoint contains, or a record "
    "was written after the checkpoint of its step",
}
"""What it means under Hugging Face's Trainer if a repeated step differs."""

_UNSEEN = f"to compare data and loss, too, give the Bridge the trainer: {_GIVE_TRAINER}"
CAUSES_WITHOUT_TRAINER = {
    "random numbers": f"{run_state.CAUSES['random numbers']}; or the data are others; {_UNSEEN}",
    "gradients": "random numbers are equal, so the data are others, or a state that no checkpoint contains has an "
    f"effect; {_UNSEEN}",
}
"""The same, where the Bridge sees neither data nor loss."""


def _in_training(handler: Callable[..., None]) -> Callable[..., None]:
    """A method of the Bridge that gets the leg, with the trainer's present progress; not called if no training runs."""

    @wraps(handler)
    def call(bridge: Bridge, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (leg := bridge._leg) is not None:
            bridge._mirror(leg.state, state)
            handler(bridge, leg, args, state, control, **kwargs)

    return call


class Bridge(transformers.TrainerCallback):
    """A ``transformers.TrainerCallback`` that calls dalsegno's callbacks.

    Their states are saved as ``checkpoint-N/dalsegno/`` with each checkpoint, and restored before training begins;
    their logs, in ``output_dir``, are cut back to that checkpoint. A flag that a handler sets on any rank sets the flag
    of that name in Hugging Face's control on all ranks. A stop saves a checkpoint first, unless it is an abort or
    ``save_strategy="no"``.

    Args:
        callbacks: dalsegno's built-ins and your own.
        trainer: the trainer, to fire the events that it has no callback for, and for the loss and the gradient norm of
            each step: ``trainer.add_callback(Bridge([EMA()], trainer=trainer))``. Its method ``train`` is wrapped, and
            during training ``training_step``, ``evaluation_loop`` and its accelerator's ``clip_grad_norm_``.
        resume_from_checkpoint: the checkpoint that is given to ``train()``, if it is not in ``output_dir``: Hugging
            Face's Trainer does not pass it to callbacks.
        on_resume: what happens if a resume is not exact, as in :class:`~dalsegno.TrainingArguments`.

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
        on_resume: OnResume = "warn",
    ) -> None:
        self._unsupported = UNSUPPORTED_EVENTS | ({} if trainer is not None else NEED_TRAINER)
        self._callbacks = checked(callbacks, self._unsupported)
        self._trainer = trainer
        self._on_resume = on_resume
        self._resume_from = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
        self._leg: Leg | None = None  # while training runs
        self._metrics: dict[str, Any] = {}  # of the final record
        if trainer is not None:
            wrap(trainer, "train", self._train)

    # -- begin and end ----------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_hyper_param_search:
            raise ConfigurationError("Bridge: a hyperparameter search trains many runs with one trainer; leave it out")
        self._warn_if_nonfinite_is_hidden(args)
        leg = Leg(
            self._callbacks,
            settings_of(args, state, self._on_resume),
            model=kwargs["model"],
            optimizer=unwrapped_optimizer(kwargs["optimizer"]),
            lr_scheduler=kwargs["lr_scheduler"],
            processing_class=kwargs["processing_class"],
            train_dataloader=kwargs["train_dataloader"],
            eval_dataloader=kwargs["eval_dataloader"],
            loop=state,
            locate=lambda step: Path(args.output_dir) / f"checkpoint-{step}" / FOLDER,
            unsupported_events=self._unsupported,
            causes=CAUSES if self._trainer is not None else CAUSES | CAUSES_WITHOUT_TRAINER,
            no_evaluations="set eval_strategy in TrainingArguments" if args.eval_strategy == "no" else None,
            excuse=partial_mean_after(state),
            samples_after=samples_of_steps(
                kwargs["train_dataloader"], args.train_batch_size * args.world_size, args.gradient_accumulation_steps
            ),
            given=self._of_trainer(),
        )
        self._mirror(leg.state, state)
        resumed_from = self._resumed_checkpoint(args, state)
        folder = None if resumed_from is None else states_in(resumed_from, mark=_mark_in(state))
        leg.begin(folder, timeline_of(state), saves=args.save_strategy != "no")
        self._leg, self._metrics = leg, {}
        if self._trainer is not None:
            self._install(self._trainer, leg)
        self._pass_on(leg, control)

    def _of_trainer(self) -> dict[str, object]:
        """Callbacks whose states Hugging Face does not save, and the trainer's class, perhaps the user's."""
        if self._trainer is None:
            return {}
        others = [each for each in self._trainer.callback_handler.callbacks if not isinstance(each, ExportableState)]
        named = {type(each).__name__: each for each in others if each is not self}
        return {**named, type(self._trainer).__name__: type(self._trainer)}

    @_in_training
    def on_train_end(self, leg: Leg, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leg = None
        leg.finish()
        leg.complete(self._metrics, is_stopped=state.global_step < state.max_steps)

    def _train(self, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Around ``trainer.train``: pass on what it raises."""
        try:
            return original(*args, **named)
        except BaseException as error:
            leg, self._leg = self._leg, None
            if leg is not None:
                leg.fail(error)
            raise

    # -- epochs and steps -------------------------------------------------------------------------------------------

    @_in_training
    def on_epoch_begin(self, leg: Leg, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        leg.epoch_begin()
        self._pass_on(leg, control)

    @_in_training
    def on_epoch_end(self, leg: Leg, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.epoch % 1 == 0 or not control.should_training_stop:  # else training has stopped inside the epoch
            leg.epoch_end()
        self._pass_on(leg, control)

    @_in_training
    def on_step_begin(self, leg: Leg, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = due_at_next_step(args, state, kwargs["train_dataloader"])
        leg.state.will_log, leg.state.will_evaluate = due.should_log, due.should_evaluate
        leg.state.will_save = due.should_save
        leg.step_begin()

    @_in_training
    def on_pre_optimizer_step(self, leg: Leg, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        leg.before_update(kwargs["optimizer"])

    @_in_training
    def on_optimizer_step(self, leg: Leg, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(kwargs["optimizer"], "step_was_skipped", False):
            leg.skip_update()
        else:
            leg.after_update()

    @_in_training
    def on_step_end(self, leg: Leg, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        leg.step_end(None if self._trainer is not None else _UNKNOWN)
        state.stateful_callbacks[_MARK] = _mark_of(state)  # in the files that Hugging Face writes before on_save
        is_due = control.should_log or control.should_evaluate or control.should_save or control.should_training_stop
        if is_due or leg.may_request_each_step():
            self._pass_on(leg, control)

    # -- records, evaluations, saves --------------------------------------------------------------------------------

    @_in_training
    def on_log(self, leg: Leg, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = {name: value for name, value in kwargs["logs"].items() if name != "epoch"}  # records have it anyway
        kind = kind_of(logs)
        if kind == "final":
            leg.end_steps()
            self._metrics = logs
        if kind == "train":
            leg.record(logs)
        else:
            leg.events.fire_record(logs, kind, leg.evaluated_weights if kind == "eval" else None)
        self._pass_on(leg, control)

    @_in_training
    def on_evaluate(self, leg: Leg, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        name, sets = set_name_of(metrics), getattr(self._trainer, "eval_dataset", None)
        is_last = not isinstance(sets, dict) or name not in sets or name == list(sets)[-1]
        leg.evaluated(dict(metrics), name, leg.evaluated_weights, is_last=is_last)
        self._pass_on(leg, control)

    @_in_training
    def on_predict(self, leg: Leg, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        leg.events.predict.fire_with(dict(metrics))

    @_in_training
    def on_save(self, leg: Leg, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = leg.save(timeline_of(state))
        leg.saved(folder.parent, is_best=state.best_global_step == state.global_step)
        self._pass_on(leg, control)

    def _warn_if_nonfinite_is_hidden(self, args: Any) -> None:
        readers = [callback.key for callback in self._callbacks if callback.reads_nonfinite_loss]
        if readers and args.logging_nan_inf_filter and collectives.rank() == 0:
            logger.warning(
                "Bridge: Hugging Face's Trainer leaves losses that are NaN or infinite out of its records, so %s "
                "cannot find them; set logging_nan_inf_filter=False in its TrainingArguments",
                " and ".join(readers),
            )

    # -- inside a step or an evaluation, by methods of the trainer --------------------------------------------------

    def _install(self, trainer: transformers.Trainer, leg: Leg) -> None:
        if trainer.accelerator.scaler is not None and leg.events.listens_anywhere(Event.GRADIENTS_READY):
            raise ConfigurationError(
                "on_gradients_ready: with fp16, gradients are still scaled where the Bridge could show them; use bf16"
            )

        def training_step(original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            leg.see_batch(inputs)
            leg.events.microbatch_begin.fire_with(inputs, len(leg.losses), sample_count(inputs))
            loss = original(model, inputs, *args, **named)
            leg.losses.append(loss.detach())
            return loss

        def evaluation_loop(
            original: Callable[..., Any], dataloader: Any, description: str, *args: Any, **named: Any
        ) -> Any:
            if description != "Evaluation":
                return original(dataloader, description, *args, **named)
            name = named.get("metric_key_prefix", "eval").removeprefix("eval_")
            leg.events.evaluate_begin.fire_with(name)
            try:
                return original(dataloader, description, *args, **named)
            finally:
                leg.events.evaluate_end.fire_with(name)

        leg.installed.callback(wrap(trainer, "training_step", training_step))
        leg.installed.callback(wrap(trainer, "evaluation_loop", evaluation_loop))
        leg.install_clipping(trainer.accelerator)

    # -- between the two --------------------------------------------------------------------------------------------

    def _mirror(self, own: TrainerState, state: Any) -> None:
        for name in ("global_step", "max_steps", "num_train_epochs", "total_flos", "best_metric"):
            setattr(own, name, getattr(state, name))
        own.epoch = state.epoch or 0.0
        own.best_global_step = state.best_global_step or 0
        own.best_model_checkpoint = state.best_model_checkpoint
        if self._trainer is None:  # else the leg counts them in batches
            own.num_input_tokens_seen = state.num_input_tokens_seen

    @staticmethod
    def _pass_on(leg: Leg, control: Any) -> None:
        """Set on the trainer's control what callbacks request, on all ranks alike. Collective."""
        if control.should_save and not leg.control.should_abort_without_save:
            leg.announce_save()
        requests = leg.requests()
        control.should_log |= requests.log
        control.should_evaluate |= requests.evaluate
        control.should_epoch_stop |= requests.end_epoch
        control.should_save |= requests.save
        if leg.stops_now(requests):
            control.should_training_stop = True
            control.should_save |= bool(leg.args.saving)
        control.should_save &= not requests.abort

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


def _mark_of(state: Any) -> dict[str, Any]:
    """That a Bridge takes part in this step, in Hugging Face's form of a callback's state."""
    return {"args": {}, "attributes": {"step": state.global_step}}


def _mark_in(state: Any) -> str | None:
    """Where the loaded ``state`` has the mark of its own step; None if it was saved without a Bridge."""
    is_marked = state.stateful_callbacks.get(_MARK) == _mark_of(state)
    return f'"{_MARK}" from "stateful_callbacks" in its trainer_state.json' if is_marked else None


def settings_of(args: Any, state: Any, on_resume: OnResume) -> TrainingArguments:
    """Hugging Face's settings as dalsegno's, as far as it has them."""
    others = ("output_dir", "per_device_eval_batch_size", "load_best_model_at_end", "metric_for_best_model")
    same = (*FELT, *others, "greater_is_better", "disable_tqdm", "run_name")
    values: dict[str, Any] = {name: getattr(args, name) for name in same}
    for kind in ("logging", "eval", "save"):
        strategy = getattr(args, f"{kind}_strategy").value
        if strategy == "best":
            values["save"] = OnBest()
        else:
            values |= {f"{kind}_strategy": strategy, f"{kind}_steps": int(getattr(state, f"{kind}_steps") or 0)}
    return TrainingArguments(
        **values,
        on_resume=on_resume,
        max_steps=state.max_steps or -1,
        num_train_epochs=float(args.num_train_epochs),
        save_total_limit=args.save_total_limit or None,
    )


def due_at_next_step(args: Any, state: Any, loader: Any) -> transformers.TrainerControl:
    """What Hugging Face's own schedule will ask for at the end of the step that begins."""
    flow, due, then = DefaultFlowCallback(), transformers.TrainerControl(), copy(state)
    then.global_step += 1
    flow.on_step_end(args, then, due)
    batches = length_of(loader)
    if batches is not None and then.global_step % max(-(-batches // args.gradient_accumulation_steps), 1) == 0:
        flow.on_epoch_end(args, then, due)
    return due


def timeline_of(state: Any) -> str:
    """Fingerprint of the records so far, which the trainer saves and restores with each checkpoint."""
    text = json.dumps(state.log_history, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def partial_mean_after(state: Any) -> Callable[[RecordDifference], str | None]:
    """Excuses the loss of the first record after a resume from ``state``, if that is between two records."""
    losses = [record["step"] for record in state.log_history if "loss" in record]
    is_between = state.global_step > 0 and state.global_step not in losses[-1:]

    def excuse(found: RecordDifference) -> str | None:
        is_first = is_between and found.key == "loss"
        return "Hugging Face's Trainer averages the first logged loss since the checkpoint only" if is_first else None

    return excuse


def kind_of(logs: dict[str, Any]) -> str:
    if "loss" in logs:
        return "train"
    if {"train_runtime", "train_loss"} <= logs.keys():
        return "final"
    return "eval" if any(name.startswith("eval_") for name in logs) else "user"


def set_name_of(metrics: dict[str, Any]) -> str:
    """Name of the evaluation set: ``eval``, or its key if there are several, as in ``eval_small_runtime``."""
    prefix = next((name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")), "eval")
    return prefix.removeprefix("eval_")
