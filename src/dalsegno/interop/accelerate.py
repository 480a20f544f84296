"""Bridge: dalsegno's callbacks in a training loop around an ``Accelerator``.

::

    bridge = Bridge(args, [JsonLogger()], accelerator, model=model, optimizer=optimizer, loader=loader)
    accelerator.load_state(checkpoint)              # restores the callbacks, too
    with bridge:
        for batch in loader:
            with accelerator.accumulate(model):
                ...                                 # forward, accelerator.backward, clip, step, zero_grad
            bridge.batch_end()
            if bridge.should_save:
                accelerator.save_state(f"runs/a/checkpoint-{bridge.step}")
            if bridge.should_stop:
                break

:meth:`Bridge.batch_end` fires the end of a step and what is due there. The accelerator's ``backward`` fires
on_epoch_begin and on_step_begin at a step's first batch, its clipping on_gradients_ready; the optimizer's hooks fire
on_pre_optimizer_step and on_optimizer_step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from dalsegno.args import TrainingArguments
from dalsegno.checkpoint import Checkpoint, unwrapped
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.events.table import Event
from dalsegno.policies.triggers import SaveTrigger
from dalsegno.state import TrainerState

from .leg import INSIDE_THE_STEP, Leg, checked, unwrapped_optimizer, wrap
from .states import FOLDER, samples_of_steps, states_in

UNSUPPORTED_EVENTS = dict.fromkeys(
    [*INSIDE_THE_STEP, Event.MICROBATCH_BEGIN, Event.MICROBATCH_END, Event.PREDICT, Event.SAVE],
    "a loop around an Accelerator cannot fire; use dalsegno.Trainer, or another callback",
)
"""Events that the Bridge never fires. A callback that handles one of them raises EventNotFired."""


CAUSES = {
    "random numbers": "a loader's new iterator draws one, so that they differ after a resume inside an epoch; or the "
    "loop reads other batches (accelerator.skip_first_batches finds the place in an epoch)",
    "loss": "random numbers are equal, so the loop reads other batches (accelerator.skip_first_batches finds the place "
    "in an epoch), or a state that no checkpoint contains has an effect",
}
"""What it means in a loop around an Accelerator if a repeated step differs; the Bridge does not see batches."""


class Bridge:
    """Calls dalsegno's callbacks, inside ``with``, and counts the steps.

    ``accelerator.save_state`` also saves the callbacks' states, as a folder ``dalsegno`` in its directory;
    ``accelerator.load_state``, called before ``with``, restores them and the number of steps.

    Args:
        args: ``output_dir``, ``max_steps`` or ``num_train_epochs``, and when to log, evaluate and save.
        callbacks: dalsegno's built-ins and your own.
        accelerator: of the loop.
        model: as ``accelerator.prepare`` returned it.
        optimizer: as ``accelerator.prepare`` returned it; the only one.
        loader: as ``accelerator.prepare`` returned it, with a length, which is that of an epoch.
        lr_scheduler: for callbacks.
        processing_class: a tokenizer, for callbacks that need one.

    Raises:
        EventNotFired: for a callback that handles an event which such a loop does not fire.
        ConfigurationError: for an object that is not a callback, or two callbacks with one key.
    """

    def __init__(
        self,
        args: TrainingArguments,
        callbacks: Iterable[object],
        accelerator: Any,
        *,
        model: Any,
        optimizer: Any,
        loader: Any,
        lr_scheduler: Any = None,
        processing_class: Any = None,
    ) -> None:
        self._args = args
        self._accelerator = accelerator
        self._optimizer = unwrapped_optimizer(optimizer)
        self._saving_to = args.directory
        self._make_leg = partial(
            Leg,
            checked(callbacks, UNSUPPORTED_EVENTS),
            args,
            model=unwrapped(model),
            optimizer=self._optimizer,
            lr_scheduler=lr_scheduler,
            processing_class=processing_class,
            train_dataloader=loader,
            locate=lambda step: self._saving_to / FOLDER,
            unsupported_events=UNSUPPORTED_EVENTS,
            causes=CAUSES,
            no_evaluations=None if args.evaluation else "set eval_steps",
            samples_after=samples_of_steps(
                loader, getattr(loader, "total_batch_size", 1), accelerator.gradient_accumulation_steps
            ),
        )
        self._steps_per_epoch = -(-len(loader) // accelerator.gradient_accumulation_steps)
        self._leg: Leg | None = None
        self._resumed_from: Path | None = None
        self._evaluated_weights: str | None = None
        self.should_evaluate = self.should_save = False
        """Whether that is due at the end of the step that has just ended; on all ranks alike."""
        self.should_stop = False
        """Whether the loop must end: a callback requests it, or all steps are done."""
        accelerator.register_load_state_pre_hook(self._note_loaded)
        accelerator.register_save_state_pre_hook(self._save)

    @property
    def state(self) -> TrainerState:
        """Progress, inside ``with``."""
        return self._followed.state

    @property
    def step(self) -> int:
        """Finished steps, over all processes of this run."""
        return self.state.global_step

    # -- begin and end ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        args, optimizer = self._args, self._optimizer
        leg = self._leg = self._make_leg(loop=object())
        folder = None if self._resumed_from is None else states_in(self._resumed_from)
        if folder is not None:
            leg.state.global_step = collectives.from_rank_zero(lambda: Checkpoint.open(folder).step)
        steps = args.max_steps if args.max_steps > 0 else int(args.num_train_epochs * self._steps_per_epoch)
        leg.state.max_steps, leg.state.num_train_epochs = steps, args.num_train_epochs
        leg.state.epoch = self.step / self._steps_per_epoch
        self.should_evaluate = self.should_save = False
        leg.begin(folder, saves=bool(args.saving))
        leg.install_clipping(self._accelerator)
        leg.installed.callback(optimizer.register_step_pre_hook(lambda own, *_: leg.before_update(own)).remove)
        leg.installed.callback(optimizer.register_step_post_hook(lambda *_: leg.after_update()).remove)
        leg.installed.callback(wrap(self._accelerator, "backward", self._backward))
        self.should_stop = self.step >= steps
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leg = self._followed
        if error is not None:
            leg.fail(error)
            return
        try:
            leg.record_end()
        except BaseException as late:
            leg.fail(late)
            raise
        leg.complete({}, is_stopped=self.step < leg.state.max_steps)

    @property
    def _followed(self) -> Leg:
        if self._leg is None:
            raise ConfigurationError("the Bridge begins with its block: with bridge: for batch in loader: …")
        return self._leg

    def _note_loaded(self, models: Any, input_dir: str) -> None:
        self._resumed_from = Path(input_dir)

    def _save(self, models: Any, weights: Any, output_dir: str) -> None:
        if self._leg is not None:
            self._saving_to = Path(output_dir)
            self._leg.save()

    # -- steps ------------------------------------------------------------------------------------------------------

    def _backward(self, original: Any, loss: torch.Tensor, *args: Any, **named: Any) -> Any:
        leg = self._followed
        if not leg.losses:
            self._begin_step(leg)
        leg.losses.append(loss.detach())
        return original(loss, *args, **named)

    def _begin_step(self, leg: Leg) -> None:
        args, state, step = self._args, leg.state, self.step + 1
        state.will_log, state.will_evaluate = self._is_due(args.logging, step), self._is_due(args.evaluation, step)
        state.will_save = bool(args.saving) and (self._is_due(args.saving, step) or step == state.max_steps)
        leg.epoch_begin()
        leg.step_begin()

    def _is_due(self, trigger: SaveTrigger, step: int) -> bool:
        epoch, rest = divmod(step, self._steps_per_epoch)
        return trigger.at_step(step) or (rest == 0 and trigger.at_epoch(epoch))

    def batch_end(self) -> None:
        """To be called after each batch, after ``accelerator.accumulate``'s block, on all ranks."""
        leg = self._followed
        self.should_evaluate = self.should_save = False
        if not self._accelerator.sync_gradients:
            return
        leg.losses = [torch.stack(leg.losses).mean()]
        leg.state.global_step += 1
        leg.state.epoch = self.step / self._steps_per_epoch
        leg.step_end()
        self._run_due_actions(leg)
        leg.losses.clear()
        if self.step % self._steps_per_epoch == 0:
            leg.epoch_end()

    def _run_due_actions(self, leg: Leg) -> None:
        state = leg.state
        logs, self.should_evaluate, self.should_save = state.will_log, state.will_evaluate, state.will_save
        if self.should_save:
            leg.announce_save()
        if leg.may_request_each_step() or self.should_save or logs:
            logs |= self._follow_requests(leg)
        if logs:
            leg.record_step({})
            self._follow_requests(leg)
        self.should_stop |= self.step >= state.max_steps
        self.should_save &= not leg.control.should_abort_without_save

    def _follow_requests(self, leg: Leg) -> bool:
        """Set the flags that callbacks on any rank request. Returns whether a record is wanted. Collective."""
        requests = leg.requests()
        self.should_evaluate |= requests.evaluate
        self.should_save |= requests.save
        if not self.should_stop and leg.stops_now(requests):
            self.should_stop = True
            self.should_save |= requests.stop
        return requests.log

    # -- evaluations and records of the user's ----------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around an evaluation, on all ranks: averages of callbacks such as EMA are in the model meanwhile."""
        events = self._followed.events
        events.evaluate_begin.fire_with("eval")
        self._evaluated_weights = self._followed.evaluated_weights
        try:
            yield
        finally:
            events.evaluate_end.fire_with("eval")

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Log an evaluation's metrics, reduced over the ranks: ``{"eval_loss": 0.7}``. On all ranks."""
        leg, weights, self._evaluated_weights = self._followed, self._evaluated_weights, None
        leg.events.fire_record(dict(metrics), "eval", weights)
        leg.evaluated(dict(metrics), "eval", weights, is_last=True)
        self._follow_requests(leg)

    def log(self, metrics: MutableMapping[str, Any]) -> None:
        """Log a record of your own, on all ranks, with the same values."""
        self._followed.log(metrics)
