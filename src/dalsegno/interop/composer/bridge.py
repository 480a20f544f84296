"""Bridge: dalsegno's callbacks in Composer's Trainer.

::

    trainer = composer.Trainer(..., callbacks=[Bridge([JsonLogger(), GradNormLogger()], output_dir="runs/a")])
    trainer.fit()

A *batch* of Composer's is a step. Its Trainer calls the Bridge as follows::

    load_state_dict → (states kept until training begins)
    fit_start → init_end, before_load, (states restored) load, train_begin
    epoch_start → epoch_begin
    batch_start → step_begin
    before_forward → microbatch_begin
    after_backward → microbatch_end; after the last one gradients_ready → (algorithms clip)
    after_train_batch → (the optimizer's hooks before a step) pre_optimizer_step
    (the optimizer's hook) → optimizer_step
    batch_end → step_skipped, step_end, and log_step, log if due
    eval_start → evaluate_begin
    eval_end → evaluate_end, log_step, log
    eval_after_all → evaluate for each set
    (a saver is due) → before_save
    state_dict → (states captured)
    epoch_end → step_done, epoch_end
    fit_end → final log_step, log; train_end
    close → train_end if training has not come to its end

Nothing of Composer is imported: its Trainer takes any object with the methods of its ``Callback``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from dalsegno.args import TrainingArguments
from dalsegno.checkpoint import unwrapped
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import Callback
from dalsegno.events.dispatcher import check_supported
from dalsegno.events.registration import check_callbacks
from dalsegno.events.table import Event
from dalsegno.interop.batches import samples_in
from dalsegno.interop.leg import INSIDE_THE_STEP, Leg, Surroundings, expect_evaluations
from dalsegno.interop.optimizer import Optimizer
from dalsegno.interop.packed import Packed, begin_packed, locate_in, save_packed
from dalsegno.witness import OnResume

from .savers import Savers

UNSUPPORTED_EVENTS = dict.fromkeys(
    [*INSIDE_THE_STEP, Event.PREDICT, Event.SAVE, Event.EXCEPTION],
    "Composer's Trainer has no callback for; use dalsegno.Trainer, or another callback",
)
"""Events that the Bridge never fires. A callback that handles one of them raises EventNotFired."""


class Bridge:
    """A callback of Composer's Trainer that calls dalsegno's callbacks.

    Their states are part of Composer's checkpoints, and restored before training begins; their logs, in ``output_dir``,
    are cut back to that checkpoint. An evaluation's metrics are those of Composer's evaluators, under names that begin
    with ``eval_``, those of an evaluator labelled ``a`` with ``eval_a_``.

    Args:
        callbacks: dalsegno's built-ins and your own.
        output_dir: where logs are written.
        logging_steps: steps between two records.
        processing_class: a tokenizer, for callbacks that need one.
        on_resume: what happens if a resume is not exact, as in :class:`~dalsegno.TrainingArguments`.

    Raises:
        EventNotFired: for a callback that handles an event which the Trainer does not fire.
        ConfigurationError: for an object that is not a callback, or two callbacks with one key; when training begins,
            for several optimizers, or a gradient scaler and a callback that handles ``on_gradients_ready``.
    """

    def __init__(
        self,
        callbacks: Iterable[object],
        *,
        output_dir: str | Path,
        logging_steps: int = 10,
        processing_class: Any = None,
        on_resume: OnResume = "warn",
    ) -> None:
        self._callbacks: list[Callback] = check_callbacks(callbacks)
        check_supported(self._callbacks, UNSUPPORTED_EVENTS)
        self._output_dir, self._logging_steps = Path(output_dir), logging_steps
        self._processing_class, self._on_resume = processing_class, on_resume
        self._leg: Leg | None = None  # since the newest fit() began
        self._is_training = self._is_stopping = False
        self._packed: Packed | None = None  # states that the Trainer has loaded, until training begins
        self._savers: Savers | None = None  # of the newest fit()
        self._optimizer: Any = None  # the only one
        self._hook: Any = None  # of it
        self._lr: float | None = None  # that the newest update used
        self._updated = False  # whether this step has updated the weights
        self._loss: torch.Tensor | None = None  # of this micro-batch
        self._microbatches = self._samples_left = 0  # begun, and not yet seen, of this step
        self._evaluated: dict[str, tuple[dict[str, Any], str | None]] = {}  # in this evaluation, by name

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        """Called by Composer at each of its events: while training runs, calls the method of that name, if there is
        one."""
        name = event.value
        if name == "fit_start":
            self.fit_start(state)
        elif self._leg is not None and self._is_training and hasattr(self, name):
            if not name.startswith("eval"):  # there, progress stands still, and the dataloader is the evaluator's
                _mirror(self._leg, state)
            getattr(self, name)(self._leg, state)

    # -- begin and end ----------------------------------------------------------------------------------------------

    def fit_start(self, state: Any) -> None:
        if len(state.optimizers) != 1:
            raise ConfigurationError("Bridge: needs one optimizer: its steps are the run's")
        optimizer = self._optimizer = Optimizer(state.optimizers[0])
        expect_evaluations(self._callbacks, are_due=bool(state.evaluators), remedy="pass eval_dataloader= to Trainer")
        self._is_stopping = False
        leg = Leg(
            self._callbacks,
            Surroundings(
                args=self._settings_of(state, optimizer),
                model=unwrapped(state.model),
                optimizer=optimizer,  # type: ignore[arg-type]
                lr_scheduler=state.schedulers[0] if len(state.schedulers) == 1 else list(state.schedulers),
                processing_class=self._processing_class,
                train_dataloader=state.dataloader,
                eval_dataloader=[each.dataloader.dataloader for each in state.evaluators] or None,
            ),
            loop=state,
            locate=locate_in(self._output_dir),
            unsupported_events=UNSUPPORTED_EVENTS,
            causes={},
        )
        if state.precision.value == "amp_fp16" and leg.events.listens_anywhere(Event.GRADIENTS_READY):
            raise ConfigurationError(
                "on_gradients_ready: with amp_fp16, gradients are still scaled where the Bridge could show them; use "
                "amp_bf16"
            )
        _mirror(leg, state)
        leg.state.will_evaluate = bool(state.evaluators)  # at every step: their intervals are asked after it
        packed, self._packed = self._packed, None
        savers = Savers(state.callbacks, lambda: self._announce_save(leg, state))
        begin_packed(leg, packed, saves=savers.exist, checkpoint="the checkpoint that was loaded")
        savers.install()
        self._leg, self._is_training, self._savers = leg, True, savers
        self._hook = state.optimizers[0].register_step_post_hook(self._after_update)
        self._follow_requests(leg, state)

    def _announce_save(self, leg: Leg, state: Any) -> None:
        leg.announce_save()
        self._follow_requests(leg, state)

    def _settings_of(self, state: Any, optimizer: Any) -> TrainingArguments:
        precision = state.precision.value
        return TrainingArguments(
            self._output_dir,
            max_steps=_max_steps(state),
            learning_rate=float(optimizer.param_groups[0]["lr"]),
            bf16=precision == "amp_bf16",
            fp16=precision == "amp_fp16",
            logging_steps=self._logging_steps,
            on_resume=self._on_resume,
        )

    def fit_end(self, leg: Leg, state: Any) -> None:
        leg.record_end()
        self._stop_following()
        leg.complete(is_stopped=self._is_stopping)

    def close(self, state: Any, logger: Any) -> None:
        if self._leg is not None and self._is_training:
            self._stop_following()
            self._leg.end("exception", {})

    def post_close(self) -> None:
        """Composer calls it after :meth:`close`."""

    def _stop_following(self) -> None:
        self._is_training = False
        self._hook.remove()
        if self._savers is not None:
            self._savers.remove()

    # -- epochs and steps -------------------------------------------------------------------------------------------

    def epoch_start(self, leg: Leg, state: Any) -> None:
        leg.epoch_begin()

    def epoch_end(self, leg: Leg, state: Any) -> None:
        leg.epoch_end()
        self._follow_requests(leg, state)

    def batch_start(self, leg: Leg, state: Any) -> None:
        assert self._savers is not None, "they take part as long as the leg"
        self._savers.is_due = self._updated = False
        self._microbatches, self._samples_left = 0, samples_in(state.batch)
        leg.state.will_log = (leg.state.global_step + 1) % self._logging_steps == 0
        leg.step_begin()
        leg.see_batch(state.batch)

    def before_forward(self, leg: Leg, state: Any) -> None:
        leg.events.microbatch_begin.fire_with(state.batch, self._microbatches, samples_in(state.batch))

    def before_backward(self, leg: Leg, state: Any) -> None:
        """Note the loss, which Composer scales in place."""
        self._loss = _total(state.loss)

    def after_backward(self, leg: Leg, state: Any) -> None:
        index, samples = self._microbatches, samples_in(state.batch)
        self._microbatches += 1
        self._samples_left -= samples
        is_last = self._samples_left <= 0
        found = {"outputs": state.outputs, "loss": self._loss}
        leg.events.microbatch_end.fire_with(self._loss, found, state.batch, index, samples, is_last)
        if is_last:
            leg.events.gradients_ready.fire_with()

    def after_train_batch(self, leg: Leg, state: Any) -> None:
        self._lr = float(self._optimizer.param_groups[0]["lr"])
        self._optimizer.run_pre_hooks()
        leg.events.pre_optimizer_step.fire_with(None)

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._updated = True
        if self._leg is not None:
            self._leg.events.optimizer_step.fire_with()

    def batch_end(self, leg: Leg, state: Any) -> None:
        if not self._updated:
            leg.events.step_skipped.fire_with("the gradient scaler found NaN or infinity")
        loss = float(state.total_loss_dict["loss/train/total"])  # the mean over the ranks
        leg.step_end(loss / collectives.world_size(), None, self._lr)
        is_due = leg.state.will_log
        if is_due or leg.may_request_each_step():
            is_due |= self._follow_requests(leg, state)
        if is_due:
            leg.record({"loss": loss, "learning_rate": self._lr}, "train")
            self._follow_requests(leg, state)

    # -- evaluations, saves -----------------------------------------------------------------------------------------

    def eval_start(self, leg: Leg, state: Any) -> None:
        leg.events.evaluate_begin.fire_with(state.dataloader_label)

    def eval_end(self, leg: Leg, state: Any) -> None:
        name, weights = state.dataloader_label, leg.evaluated_weights
        leg.events.evaluate_end.fire_with(name)
        prefix = "eval_" if name == "eval" else f"eval_{name}_"
        computed = state.eval_metric_values
        metrics = {f"{prefix}{each}": float(computed[each]) for each in state.eval_metrics[name]}
        leg.record(metrics, "eval", weights)
        self._evaluated[name] = metrics, weights

    def eval_after_all(self, leg: Leg, state: Any) -> None:
        evaluated, self._evaluated = self._evaluated, {}
        for name, (metrics, weights) in evaluated.items():
            leg.evaluated(metrics, name, weights, is_last=name == list(evaluated)[-1])
        self._follow_requests(leg, state)

    def state_dict(self) -> dict[str, Any]:
        """Called on all ranks when a checkpoint is saved."""
        if self._packed is not None or self._leg is None:
            return {} if self._packed is None else {"dalsegno": self._packed}
        return {"dalsegno": save_packed(self._leg)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the states until training begins, which restores them."""
        self._packed = state.get("dalsegno")

    # -- between the two --------------------------------------------------------------------------------------------

    def _follow_requests(self, leg: Leg, state: Any) -> bool:
        """Do what callbacks on any rank request, on all ranks. Returns whether a record is wanted. Collective."""
        requests, savers = leg.requests(), self._savers
        assert savers is not None, "they take part as long as the leg"
        if requests.evaluate or requests.end_epoch:
            raise ConfigurationError(
                "should_evaluate and should_epoch_stop: Composer's Trainer has no such requests; leave them to "
                "eval_interval= and train_subset_num_batches="
            )
        if requests.save and not savers.exist:
            raise ConfigurationError("should_save: the Trainer saves no checkpoints; pass it save_folder=")
        savers.is_due |= requests.save
        savers.is_forbidden |= requests.abort
        if (requests.stop or requests.abort) and not self._is_stopping:
            self._is_stopping = True
            state.stop_training()
            leg.warn_stops()
        return requests.log


def _mirror(leg: Leg, state: Any) -> None:
    """Copy the Trainer's progress to dalsegno's state."""
    own, done = leg.state, state.timestamp
    own.global_step, own.samples_seen = done.batch.value, done.sample.value
    own.num_input_tokens_seen = done.token.value
    own.max_steps = _max_steps(state)
    length = state.dataloader_len
    own.epoch = done.epoch.value + (done.batch_in_epoch.value / length.value if length is not None else 0)


def _max_steps(state: Any) -> int:
    """Steps of the whole training; -1 if its duration is not in batches or epochs of a known length."""
    duration, length = state.max_duration, state.dataloader_len
    if duration.unit.name == "BATCH":
        return int(duration.value)
    if duration.unit.name == "EPOCH" and length is not None:
        return int(duration.value * length.value)
    return -1


def _total(loss: Any) -> torch.Tensor:
    """A micro-batch's loss as Composer adds it up: the total of a dict, else the sum of the means."""
    if isinstance(loss, dict):
        return loss["total"].detach().clone() if "total" in loss else _total(tuple(loss.values()))
    losses = loss if isinstance(loss, tuple | list) else (loss,)
    return torch.stack([each.detach().mean() for each in losses]).sum()
