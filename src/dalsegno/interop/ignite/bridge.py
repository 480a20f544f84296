"""Bridge: dalsegno's callbacks in a training that an Ignite ``Engine`` runs.

::

    bridge = Bridge([JsonLogger(), EMA()], trainer, model=model, optimizer=optimizer, evaluators=evaluator)
    to_save = {"model": model, "optimizer": optimizer, "trainer": trainer, "callbacks": bridge}
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(to_save, "runs/a"))
    trainer.run(loader, max_epochs=10)

The engines' events, in brackets what is called between them, fire dalsegno's as follows::

    (load_state_dict) → (states kept until training begins)
    STARTED → init_end, before_load, (states restored) load, train_begin
    EPOCH_STARTED → epoch_begin
    ITERATION_STARTED → step_begin before a step's first batch, microbatch_begin
    (Bridge.clip_grad_norm_, else the optimizer's hook before its step) → gradients_ready
    (the optimizer's hooks) → pre_optimizer_step, optimizer_step
    ITERATION_COMPLETED → microbatch_end; after a step's last batch step_skipped, step_end, and log_step, log if due
    (an evaluator's run) → evaluate_begin
    COMPLETED of an evaluator → evaluate_end, log_step, log, evaluate
    (state_dict) → before_save, (states captured)
    EPOCH_COMPLETED → step_done, epoch_end
    (the end of the trainer's run) → final log_step, log; train_end; after an exception: exception, train_end
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events

from dalsegno.args import TrainingArguments
from dalsegno.checkpoint import unwrapped
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import Callback
from dalsegno.events.dispatcher import check_supported
from dalsegno.events.registration import check_callbacks
from dalsegno.events.table import Event
from dalsegno.interop.batches import global_batch_size, samples_in
from dalsegno.interop.leg import INSIDE_THE_STEP, Leg, Surroundings, expect_evaluations
from dalsegno.interop.packed import Packed, begin_packed, locate_in, save_packed
from dalsegno.interop.wrapping import unwrapped_optimizer, wrap
from dalsegno.witness import OnResume

from .requests import Request, Requests
from .translation import as_loss, eval_metrics
from .update import Update

__all__ = ["UNSUPPORTED_EVENTS", "Bridge", "Request"]

logger = logging.getLogger("dalsegno")

UNSUPPORTED_EVENTS = dict.fromkeys(
    [*INSIDE_THE_STEP, Event.PREDICT, Event.SAVE],
    "Ignite's Engine has no event for; use dalsegno.Trainer, or another callback",
)
"""Events that the Bridge never fires. A callback that handles one of them raises EventNotFired."""


CAUSES = {
    "data": "Ignite restores neither the place in an epoch nor the random numbers from which shuffle=True draws an "
    "order",
    "random numbers": "Ignite does not restore them",
    "record": "the steps are equal, so a callback has a state that no checkpoint contains, or an evaluation came after "
    "the checkpoint of its step",
}
"""What it means under an Ignite Engine if a repeated step differs."""


class Bridge:
    """Calls dalsegno's callbacks while ``trainer`` runs.

    An object with state for Ignite's ``Checkpoint``: its states are those of the callbacks, which are restored before
    training begins; their logs, in ``output_dir``, are cut back to that checkpoint. Handlers that save or evaluate are
    added to the engines after the Bridge is built.

    Args:
        callbacks: dalsegno's built-ins and your own.
        trainer: each of its iterations is a forward and a backward pass. Its method ``run`` is wrapped, and those of
            the evaluators.
        model: which it trains; DDP's wrapper is removed for callbacks.
        optimizer: which it steps; the only one.
        output_dir: where logs are written.
        logging_steps: steps between two records.
        gradient_accumulation_steps: iterations in a step; the last one steps the optimizer.
        evaluators: engines that evaluate the model, by name; several evaluate in this order. Their metrics are logged,
            under names that begin with ``eval_``, those of the set ``a`` with ``eval_a_``.
        output_transform: from the trainer's output to the iteration's loss, if that is not the output itself.
        lr_scheduler: for callbacks.
        processing_class: a tokenizer, for callbacks that need one.
        on_resume: what happens if a resume is not exact, as in :class:`~dalsegno.TrainingArguments`.

    Raises:
        EventNotFired: for a callback that handles an event which an Engine does not fire.
        ConfigurationError: for an object that is not a callback, or two callbacks with one key.
    """

    def __init__(
        self,
        callbacks: Iterable[object],
        trainer: Engine,
        *,
        model: Any,
        optimizer: Any,
        output_dir: str | Path,
        logging_steps: int = 10,
        gradient_accumulation_steps: int = 1,
        evaluators: Engine | Mapping[str, Engine] | None = None,
        output_transform: Callable[[Any], Any] = lambda output: output,
        lr_scheduler: Any = None,
        processing_class: Any = None,
        on_resume: OnResume = "warn",
    ) -> None:
        self._callbacks: list[Callback] = check_callbacks(callbacks)
        check_supported(self._callbacks, UNSUPPORTED_EVENTS)
        self._trainer = trainer
        self._evaluators = {"eval": evaluators} if isinstance(evaluators, Engine) else dict(evaluators or {})
        self._model, self._optimizer = unwrapped(model), unwrapped_optimizer(optimizer)
        self._lr_scheduler, self._processing_class = lr_scheduler, processing_class
        self._output_dir, self._logging_steps, self._on_resume = Path(output_dir), logging_steps, on_resume
        self._accumulated, self._output_transform = gradient_accumulation_steps, output_transform
        self._requests, self._update = Requests(trainer), Update(self._model, self._optimizer)
        self._leg: Leg | None = None  # since the newest run began
        self._is_training = self._is_interrupted = self._has_warned = False
        self._packed: Packed | None = None  # states that were loaded, until training begins
        self._evaluating: str | None = None  # set that is evaluated
        self._losses: list[torch.Tensor] = []  # of this step's batches
        self._completed = 0  # iterations whose end the callbacks have seen
        self._saved = -1  # completed iterations of the newest checkpoint
        self._attach()

    def _attach(self) -> None:
        trainer = self._trainer
        trainer.add_event_handler(Events.STARTED, self._begin)
        trainer.add_event_handler(Events.EPOCH_STARTED, self._begin_epoch)
        trainer.add_event_handler(Events.ITERATION_STARTED, self._begin_iteration)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._end_iteration)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, self._end_epoch)
        trainer.add_event_handler(Events.INTERRUPT, self._note_interrupt)
        wrap(trainer, "run", self._run)
        for name, evaluator in self._evaluators.items():
            evaluator.add_event_handler(Events.COMPLETED, self._end_evaluation)
            wrap(evaluator, "run", partial(self._evaluate, name))

    # -- begin and end ----------------------------------------------------------------------------------------------

    def _run(self, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Around ``trainer.run``, which reports no exception that a handler of EXCEPTION_RAISED handles."""
        self._is_interrupted = False
        try:
            state = original(*args, **named)
        except BaseException as error:
            if (leg := self._followed()) is not None:
                self._stop_following()
                leg.fail(error)
            raise
        if not self._is_interrupted and (leg := self._followed()) is not None:
            self._end(leg)
        return state

    def _begin(self) -> None:
        expect_evaluations(self._callbacks, are_due=bool(self._evaluators), remedy="pass evaluators= to the Bridge")
        self._completed, self._evaluating = self._trainer.state.iteration, None
        leg = Leg(
            self._callbacks,
            Surroundings(
                args=self._settings(),
                model=self._model,
                optimizer=self._optimizer,
                lr_scheduler=self._lr_scheduler,
                processing_class=self._processing_class,
                train_dataloader=self._trainer.state.dataloader,
            ),
            loop=self._trainer,
            locate=locate_in(self._output_dir),
            unsupported_events=UNSUPPORTED_EVENTS,
            causes=CAUSES,
        )
        self._mirror(leg)
        leg.state.will_evaluate = bool(self._evaluators)  # at every step, since handlers may evaluate at any
        self._warn_if_inside_a_step(leg)
        packed, self._packed = self._packed, None
        begin_packed(leg, packed, saves=True, checkpoint=f"the checkpoint of step {leg.state.global_step}")
        self._leg, self._is_training = leg, True
        self._losses.clear()
        self._update.install(leg)
        self._requests.begin()
        self._requests.follow(leg)

    def _warn_if_inside_a_step(self, leg: Leg) -> None:
        if self._completed % self._accumulated and leg.state.is_world_process_zero:
            logger.warning(
                "training resumes at iteration %d, inside a step of %d iterations: no checkpoint contains the "
                "gradients of those before. Save at multiples of %d iterations",
                *(self._completed, self._accumulated, self._accumulated),
            )

    def _settings(self) -> TrainingArguments:
        state = self._trainer.state
        return TrainingArguments(
            self._output_dir,
            max_steps=self._max_steps(),
            num_train_epochs=float(state.max_epochs or 1),
            per_device_train_batch_size=global_batch_size(state.dataloader, 1) or 1,
            gradient_accumulation_steps=self._accumulated,
            learning_rate=float(self._optimizer.param_groups[0]["lr"]),
            logging_steps=self._logging_steps,
            on_resume=self._on_resume,
        )

    def _end(self, leg: Leg) -> None:
        try:
            leg.record_end()
            leg.complete(is_stopped=not _all_done(leg))
        finally:
            self._stop_following()

    def _stop_following(self) -> None:
        self._is_training = False
        self._update.remove()

    def _note_interrupt(self) -> None:  # the next run() continues this one
        self._is_interrupted = True

    # -- epochs and steps -------------------------------------------------------------------------------------------

    def _begin_epoch(self) -> None:
        if (leg := self._followed()) is not None:
            leg.epoch_begin()

    def _end_epoch(self) -> None:
        if (leg := self._followed()) is not None:
            leg.epoch_end()
            self._requests.follow(leg)

    def _begin_iteration(self) -> None:
        leg, state = self._followed(), self._trainer.state
        if leg is None:
            return
        index = (state.iteration - 1) % self._accumulated
        if index == 0:
            leg.state.will_log = (leg.state.global_step + 1) % self._logging_steps == 0
            self._losses.clear()
            self._update.begin_step()
            leg.step_begin()
        leg.see_batch(state.batch)
        leg.events.microbatch_begin.fire_with(state.batch, index, samples_in(state.batch))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the model's gradients, to be called between ``backward`` and the optimizer's step, after a scaler's
        ``unscale_``. Fires on_gradients_ready before.

        Returns:
            Total norm of the gradients before clipping.
        """
        return self._update.clip(max_norm, norm_type)

    def _end_iteration(self) -> None:
        """Once for an iteration, before it is evaluated or saved."""
        state = self._trainer.state
        if self._leg is None or not self._is_training or self._completed == state.iteration:
            return
        self._completed, leg = state.iteration, self._leg
        self._mirror(leg)
        loss = as_loss(self._output_transform(state.output))
        is_last = state.iteration % self._accumulated == 0
        index, samples = (state.iteration - 1) % self._accumulated, samples_in(state.batch)
        leg.events.microbatch_end.fire_with(loss, {"output": state.output}, state.batch, index, samples, is_last)
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss)
        if is_last:
            self._end_step(leg, loss)

    def _end_step(self, leg: Leg, loss: Any) -> None:
        if not self._update.is_done:
            leg.events.step_skipped.fire_with("the gradient scaler found NaN or infinity")
        share = torch.stack(self._losses).mean() / collectives.world_size() if self._losses else None
        leg.step_end(loss if share is None else share, self._update.grad_norm, self._update.lr)
        is_due = leg.state.will_log
        if is_due or leg.may_request_each_step():
            is_due |= self._requests.follow(leg)
        if is_due:
            self._log(leg, share)
            self._requests.follow(leg)

    def _log(self, leg: Leg, share: torch.Tensor | None) -> None:
        logs: dict[str, Any] = {}
        if share is not None:
            logs["loss"] = collectives.sum_floats([float(share)], "the loss of a record")[0]
        if self._update.grad_norm is not None:
            logs["grad_norm"] = float(self._update.grad_norm)
        leg.record({**logs, "learning_rate": self._update.lr}, "train")

    def log(self, metrics: MutableMapping[str, Any]) -> None:
        """Log a record of your own, during training, on all ranks with the same values."""
        leg = self._followed()
        if leg is None:
            raise ConfigurationError("Bridge.log: the trainer does not run")
        leg.log(metrics)

    # -- evaluations, states ----------------------------------------------------------------------------------------

    def _evaluate(self, name: str, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Around an evaluator's ``run``."""
        leg = self._followed()
        if leg is None:
            return original(*args, **named)
        self._end_iteration()
        if self._saved == self._completed and not (self._requests.is_stopping or _all_done(leg)):
            self._warn_evaluation_is_not_repeated(leg)
        self._evaluating = name
        leg.events.evaluate_begin.fire_with(name)
        try:
            return original(*args, **named)
        finally:
            self._close_evaluation(leg)

    def _warn_evaluation_is_not_repeated(self, leg: Leg) -> None:
        if leg.state.is_world_process_zero and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "step %d is evaluated after its checkpoint was saved: training that resumes from there does not "
                "repeat the evaluation, whose record is then missing. Add the handler that saves to the trainer after "
                "the one that evaluates",
                leg.state.global_step,
            )

    def _close_evaluation(self, leg: Leg) -> None:
        if self._evaluating is not None:
            leg.events.evaluate_end.fire_with(self._evaluating)
            self._evaluating = None

    def _end_evaluation(self, evaluator: Engine) -> None:
        leg, name = self._followed(), self._evaluating
        if leg is None or name is None:
            return
        self._close_evaluation(leg)
        weights, metrics = leg.evaluated_weights, eval_metrics(evaluator.state.metrics, name)
        leg.record(metrics, "eval", weights)
        leg.evaluated(metrics, name, weights, is_last=name == list(self._evaluators)[-1])
        self._requests.follow(leg, evaluates=False)

    def state_dict(self) -> dict[str, Any]:
        """Capture the callbacks' states. To be called on all ranks; ``Checkpoint`` does so.

        Raises:
            ConfigurationError: within a step or an evaluation, whose end the callbacks have not seen.
        """
        leg = self._leg
        if self._packed is not None or leg is None:
            return {} if self._packed is None else {"dalsegno": self._packed}
        if self._is_training and (self._evaluating is not None or self._completed != self._trainer.state.iteration):
            raise ConfigurationError(
                "Bridge: a checkpoint is saved before callbacks have seen the end of this step or evaluation; add the "
                "handler that saves after building the Bridge: engine.add_event_handler(…, checkpoint)"
            )
        self._mirror(leg)
        self._saved = self._completed
        return {"dalsegno": save_packed(leg)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the states until the trainer runs, which restores them."""
        self._packed = state_dict.get("dalsegno")

    # -- between the two --------------------------------------------------------------------------------------------

    def _followed(self) -> Leg | None:
        """The leg, with the trainer's present progress; None if it does not run."""
        if not self._is_training or self._leg is None:
            return None
        self._mirror(self._leg)
        return self._leg

    def _mirror(self, leg: Leg) -> None:
        own, state, completed = leg.state, self._trainer.state, self._completed
        own.global_step = completed // self._accumulated
        own.max_steps = self._max_steps()
        own.num_train_epochs = float(state.max_epochs or 0)
        own.epoch = completed / state.epoch_length if state.epoch_length else max(state.epoch - 1, 0)
        batch = global_batch_size(state.dataloader, collectives.world_size())
        own.samples_seen = own.global_step * self._accumulated * batch

    def _max_steps(self) -> int:
        """Steps of the whole training; -1 if the length of an epoch is not known yet."""
        state = self._trainer.state
        if state.max_iters is not None:
            return int(state.max_iters // self._accumulated)
        if state.epoch_length is None:
            return -1
        return int((state.max_epochs or 1) * state.epoch_length // self._accumulated)


def _all_done(leg: Leg) -> bool:
    return 0 < leg.state.max_steps <= leg.state.global_step
