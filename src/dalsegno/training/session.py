"""Session: one leg of a run. Events, state and checkpoints around a training loop.

A leg is one process's part of a run. Usage, in :mod:`dalsegno.training.loop` and in a loop around ``dalsegno.Run``::

    with session:                               # on_train_begin
        for steps in session.timelines():       # one more after each rollback
            for step_batch in steps:            # on_epoch_begin, on_step_begin
                ...                             # forward, backward, update
                session.step_end(loss=..., ...) # on_step_end; then log, evaluate, save, stop: whatever is due
    session.result                              # on_train_end has fired, in any case
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from dalsegno.data.cut_batches import cut_to
from dalsegno.data.step_batch import LossWeight, StepBatch, agreed_position, iter_steps
from dalsegno.distributed import collectives
from dalsegno.distributed.modes import parts_of_batch
from dalsegno.errors import ConfigurationError, EmptyDataset, LeaseLost
from dalsegno.events.dispatcher import note_failures, raise_first
from dalsegno.policies.recovery import Rollback
from dalsegno.state import NO_REQUESTS, ControlRequests

from .action_schedule import ActionSchedule
from .checkpoint_sources import CheckpointSources
from .leg_recorder import LegRecorder
from .result import TrainResult, reason_of
from .run_parts import RunParts
from .step_boundary import StepBoundary

logger = logging.getLogger("dalsegno")


class Session:
    """One leg: begins with the restored state, and ends when the run does or a stop is requested.

    ``begin_witness`` prepares the witness of the leg's steps; ``roll_back`` restores the checkpoint of a rollback.
    """

    def __init__(
        self,
        parts: RunParts,
        boundary: StepBoundary,
        checkpoints: CheckpointSources,
        leg_recorder: LegRecorder,
        *,
        begin_witness: Callable[[], None],
        roll_back: Callable[[Rollback], None],
        loss_weight: LossWeight | None,
        resumed_from: Path | None,
    ) -> None:
        self.result: TrainResult | None = None
        """How the leg ended; None until it has."""
        self.step_batch: StepBatch | None = None
        """The step in progress; None between :meth:`step_end` and the next step."""
        self._parts = parts
        self._args = parts.args
        self._state = parts.state
        self._control = parts.control
        self._dispatcher = parts.dispatcher
        self._loader = parts.loader
        self._boundary = boundary
        self._checkpoints = checkpoints
        self._leg_recorder = leg_recorder
        self._begin_witness = begin_witness
        self._restore = roll_back
        self._loss_weight = loss_weight
        self._resumed_from = resumed_from
        self._schedule = ActionSchedule(parts.args)
        self._data_size = parts.layout.data_size  # once: it takes a call
        self._alone = collectives.world_size() == 1
        self._parts_of_batch = parts_of_batch(parts.args.parallel)
        self._position = parts.loader.position  # after the step in progress, in epochs; the same on all ranks
        self._ends_epoch = False  # whether the step in progress is its epoch's last, if the length of the data is known
        self._due = NO_REQUESTS
        self._data_is_exhausted = False
        self._is_first_step = True  # of the leg
        self._final_metrics: dict[str, Any] = {}

    # -- begin and end ------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        state = self._state
        self._boundary.begin_leg()
        self._parts.buffers.begin_leg()
        self._parts.flags.begin_leg()
        state.clock.start()
        self._leg_recorder.begin(self._resumed_from)
        try:
            self._boundary.commands.queue.open()
            self._dispatcher.train_begin.fire_with(self._resumed_from, self._checkpoints.memory.room)
            self._parts.flags.note_changes()
            self._begin_witness()
            self._dispatcher.leave_out_idle()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._boundary.commands.close()
        self._parts.random_state.keep()
        if error is None:
            try:
                if self._boundary.rollback is not None:  # the loop was left at the step that decided to go back
                    self._roll_back(self._boundary.rollback)
                if not (self._is_over() or self._data_is_exhausted):
                    if self._ends_epoch and self.step_batch is None:  # left between an epoch's last step and its end
                        self._boundary.save_held(also=self._state.will_save)
                    self._control.stop("the loop was left before its end", by="the loop")
                self._boundary.saves.finish()
                self._parts.witness.conclude(self._state.global_step)
                self._final_metrics = self._boundary.recorder.final_metrics()
                self._dispatcher.fire_record(self._final_metrics, "final")
                self._checkpoints.load_best_model()
            except BaseException as late:
                self._close(late)
                raise
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        """Fire on_exception if there was one, then on_train_end, once. Not collective: after an exception the other
        ranks may be gone."""
        dispatcher, request, metrics = self._dispatcher, self._control.stop_request, self._final_metrics
        self._state.clock.stop()
        self._boundary.commands.close()
        failures = _failures(self._boundary.saves.close) + _failures(
            partial(self._parts.witness.close, self._state.global_step)
        )
        result = self.result = TrainResult(
            global_step=self._state.global_step,
            reason=reason_of(error, self._control, self._data_is_exhausted),
            why=self._control.stop_reason if error is None else f"{type(error).__name__}: {error}",
            stopped_by=self._control.stopped_by,
            metrics=metrics,
            checkpoint=self._boundary.saves.newest,
            diverged=error is None and request is not None and request.diverged,
        ).with_best(self._state, self._checkpoints.manager.path_of)
        is_needed = error is not None or (result.reason != "aborted" and not self._boundary.saves.is_on_disk())
        failures += _failures(partial(self._checkpoints.memory.close, remove=not is_needed))
        failures += _failures(self._loader.close)
        if error is not None and dispatcher.exception:
            dispatcher.exception.fill(error)
            failures += dispatcher.exception.fire_all()
        if dispatcher.train_end:
            dispatcher.train_end.fill(result.reason, metrics, result.checkpoint)
            failures += dispatcher.train_end.fire_all()
        if result.reason == "taken_over":  # files of the run are the other process's
            failures = [failure for failure in failures if not isinstance(failure, LeaseLost)]
        else:
            failures += _failures(partial(self._leg_recorder.end, result))
        if error is None and (late := self._control.rollback_request) is not None:
            logger.warning("%s requests to go back (%s) after the last step: the run stays", late.by, late.reason)
        if error is None:
            raise_first(failures)
        else:
            note_failures(error, failures)

    # -- steps --------------------------------------------------------------------------------------------------

    def timelines(self) -> Iterator[Iterator[StepBatch]]:
        """The micro-batches of each remaining step: as planned, then once more from the checkpoint of each rollback.
        :meth:`step_end` must be called before the next step.
        """
        self._parts.flags.resume()
        try:
            yield self._steps()
            while self._boundary.rollback is not None:
                self._roll_back(self._boundary.rollback)
                yield self._steps()
        finally:
            if self.result is None:  # else this is collected after the leg, perhaps during another one
                self._parts.random_state.keep()

    def _roll_back(self, rollback: Rollback) -> None:
        self._restore(rollback)
        self._schedule = ActionSchedule(self._args)
        self._due, self._ends_epoch, self._data_is_exhausted = NO_REQUESTS, False, False

    def _steps(self) -> Iterator[StepBatch]:
        loader = self._loader
        self._position = agreed_position(loader, self._parts.layout)
        self._parts.random_state.give_back()
        if self._boundary.should_stop_now():
            return
        if self._args.recovery is not None and self._state.global_step == 0:
            self._boundary.save()  # to which a rollback before the first regular save goes back
        if self._state.evaluations_owed:
            self._boundary.run_due_actions(ControlRequests(evaluate=True), ends_step=loader.started)
        if not (self._args.save_in_background or self._epoch_is_used_up()):
            self._boundary.saves.finalize()  # of the checkpoint that the leg resumes from
        while not self._is_over():
            if not loader.started:
                self._state.epoch_is_cut = False  # a request at the previous epoch's end does not cut this one
                self._dispatcher.epoch_begin.fire_with(loader.epoch)
            yield from self._rest_of_epoch()
            if self._boundary.leaving or self._ends_inside_epoch():
                return
            if not loader.started:
                if self._state.global_step == 0:
                    raise EmptyDataset("the training data contains no batch; look at the dataset, or at drop_last")
                self._data_is_exhausted = True
                self._boundary.run_due_actions(ControlRequests(save=bool(self._args.saving)))
                return
            self._dispatcher.epoch_end.fire_with(loader.epoch)
            due = self._due_at_epoch_end(self._state.global_step)
            loader.next_epoch()
            self._state.epoch = self._position = loader.position
            self._boundary.run_due_actions(due)

    def _rest_of_epoch(self) -> Iterator[StepBatch]:
        if self._state.epoch_is_cut:  # by the step that the leg resumes from
            return
        step_begin = self._dispatcher.step_begin
        lengths = self._args.sequence_lengths
        length = None if lengths is None else lambda: lengths.at(self._state.global_step)
        cut = cut_to(length, self._parts_of_batch)
        for step_batch in iter_steps(self._loader, self._step_sizes(), self._parts.layout, self._loss_weight, cut):
            if 0 < self._args.max_steps <= self._state.global_step:  # the loader yields more than its length
                return
            self._plan_step(step_batch)
            if self._is_first_step:  # again: some loaders and callbacks create state with the first batch
                self._boundary.saves.check_serializable()
            if self._state.global_step + 1 >= self._parts.witness.next_step:
                batches = (each.batch for each in step_batch.microbatches)
                self._parts.witness.begin_step(self._state.global_step + 1, batches)
            if step_begin:
                step_begin.fire()
            if self._is_first_step:
                self._parts.flags.note_changes()
            self.step_batch = step_batch
            yield step_batch
            if self.step_batch is not None:
                raise ConfigurationError(
                    f"step {self._state.global_step + 1} did not end before the next batch was taken: call "
                    "run.step_end(loss=…) after each batch for which run.is_last_microbatch is true (an epoch's last "
                    "step may have fewer batches than the others), also after one without an update. To accumulate "
                    "over batches, set gradient_accumulation_steps; to load ahead, do it in the loader"
                )
            if self._boundary.leaving or self._state.epoch_is_cut or self._ends_inside_epoch():
                return

    def _step_sizes(self) -> Iterator[int]:
        accumulation, state, parts = self._args.accumulation, self._state, self._parts_of_batch
        changing = (accumulation.at(done) * parts for done in range(state.global_step, accumulation.last_change))
        return chain(changing, repeat(accumulation.at(accumulation.last_change) * parts))

    def step_end(
        self,
        loss: torch.Tensor,
        *,
        grad_norm: torch.Tensor | None = None,
        lr: float | torch.Tensor | None = None,
    ) -> None:
        """Count the step, whose update is done, and run what is due. For the arguments see ``StepResult``."""
        state, dispatcher, step_batch = self._state, self._dispatcher, self.step_batch
        assert step_batch is not None, "step_end() ends a step that steps() has yielded"
        self.step_batch = None
        if self._is_first_step:
            self._parts.flags.note_changes(by_modules=True)
            self._is_first_step = False
        self._parts.buffers.share()
        self._boundary.recorder.add_step(loss, grad_norm, lr, step_batch.tokens)
        if self._parts.witness.is_recording:
            self._parts.witness.end_step(loss, grad_norm, lr)
        state.global_step += 1
        state.epoch = self._position
        state.samples_seen += step_batch.samples
        state.num_input_tokens_seen += step_batch.tokens * self._data_size
        if dispatcher.step_end:
            dispatcher.step_end.fill(loss, grad_norm, lr)
            dispatcher.step_end.fire()
        self._boundary.recorder.report_step(loss, grad_norm, step_batch.tokens)
        self._boundary.run_due_actions(self._due, epoch_ends=self._ends_epoch, replan=self._replan, ends_step=True)
        self._boundary.commands.end_step()

    def _plan_step(self, step_batch: StepBatch) -> None:
        """Determine what the step's end will do, so that callbacks capture costly things only if they are used."""
        state, control, step = self._state, self._control, self._state.global_step + 1
        self._position, state.data_seconds = step_batch.place, step_batch.seconds
        self._ends_epoch = ends_epoch = self._position >= self._loader.epoch + 1
        self._due = due = self._schedule.at_step(step, self._position, ends_epoch=ends_epoch)
        later = self._due_at_epoch_end(step) if ends_epoch else NO_REQUESTS
        # A request of this rank alone counts only once the others know of it: collectives depend on these flags.
        state.will_log = due.log or later.log or (self._alone and control.should_log)
        state.will_save = due.save or later.save or (self._alone and control.should_save)
        state.will_evaluate = due.evaluate or later.evaluate or (self._alone and control.should_evaluate)
        state.will_evaluate |= self._args.eval_on_save and state.will_save

    def _replan(self) -> ControlRequests:
        self._schedule = ActionSchedule(self._args)
        return self._schedule.at_step(self._state.global_step, self._position, ends_epoch=self._ends_epoch)

    def _due_at_epoch_end(self, step: int) -> ControlRequests:
        return self._schedule.at_epoch_end(self._loader.epoch + 1, step)

    def _ends_inside_epoch(self) -> bool:
        """Whether the run ends here, within an epoch, so that on_epoch_end does not fire."""
        if not self._schedule.is_last(self._state.global_step, self._position):
            return False
        return not self._epoch_is_used_up()

    def _epoch_is_used_up(self) -> bool:
        """Whether only on_epoch_end is left of the epoch, if the length of the data is known."""
        return self._loader.started and self._position >= self._loader.epoch + 1

    def _is_over(self) -> bool:
        return self._boundary.leaving or self._ends_inside_epoch()


def _failures(work: Callable[[], object]) -> list[BaseException]:
    try:
        work()
    except BaseException as error:
        return [error]
    return []
