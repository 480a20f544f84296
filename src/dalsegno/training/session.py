"""Run: one leg of a training run. Events, state and checkpoints around anybody's loop.

What a loop does with it, :mod:`dalsegno.training.loop` as well as one written by hand::

    with run:                                   # on_train_begin
        for draw in run.draws():                # on_epoch_begin, on_step_begin
            ...                                 # the update
            run.step_end(loss=..., ...)         # on_step_end; then log, evaluate, save, stop: whatever is due
    run.result                                  # on_train_end has fired, whatever happened
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from dalsegno.args import TrainingArguments
from dalsegno.data import ResumableLoader
from dalsegno.data.step_batch import LossWeight, StepBatch, agreed_place, iter_steps
from dalsegno.distributed import collectives
from dalsegno.distributed.buffers import SharedBuffers
from dalsegno.errors import ConfigurationError, EmptyDataset, SaveFailed
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.events.table import Event
from dalsegno.logs import RunFile
from dalsegno.state import TrainerControl, TrainerState

from .metrics import MetricAccumulator
from .result import TrainResult, reason_of
from .save_coordinator import Saver
from .step_boundary import DueActions, StepBoundary

_NOTHING = DueActions()


class Run:
    """All parts are given, and restored already: the Trainer does so, or ``dalsegno.Run`` for a hand-written loop."""

    def __init__(
        self,
        args: TrainingArguments,
        *,
        on: Dispatcher,
        state: TrainerState,
        control: TrainerControl,
        feed: ResumableLoader,
        meter: MetricAccumulator,
        boundary: StepBoundary,
        saver: Saver,
        buffers: SharedBuffers,
        run_file: RunFile,
        loss_weight: LossWeight | None = None,
        resumed_from: Path | None = None,
    ) -> None:
        self.args = args
        self.state = state
        self.control = control
        self.result: TrainResult | None = None
        self._on = on
        self._feed = feed
        self._meter = meter
        self._boundary = boundary
        self._saver = saver
        self._buffers = buffers
        self._loss_weight = loss_weight
        self.resumed_from = resumed_from
        self._world_size = collectives.world_size()
        self._legs = run_file if collectives.rank() == 0 else None
        self._logging, self._evaluation, self._saving = args.logging, args.evaluation, args.saving
        self._draw: StepBatch | None = None  # the one whose step has not ended yet
        self._place = feed.position  # behind that draw, in epochs; the same on all ranks
        self._ends_epoch = False  # with that draw, where the length is known
        self._due = _NOTHING
        self._exhausted = False
        self._is_rehearsed = False
        self._final_metrics: dict[str, Any] = {}
        self._listens_to_metrics = False

    # -- begin and end ------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        state = self.state
        self._listens_to_metrics = self._on.listens_anywhere(Event.TRAIN_METRICS)
        self._boundary.begin_leg()
        self._buffers.begin_leg()
        state.clock.start()
        if self._legs is not None:
            with _writing(self._legs, "nothing is trained, and what was there before is as it was"):
                self._legs.begin(self._relative(self.resumed_from), self._world_size, state.global_step)
        try:
            if self._on.train_begin:
                self._on.train_begin.fill(self.resumed_from)
                self._on.train_begin.fire()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                if not (self._is_over() or self._exhausted):
                    self._save_before_epoch_end()
                    self.control.stop("the loop was left before its end", by="the loop")
                self._finish()
            except BaseException as late:
                self._close(late)
                raise
        self._close(error)

    def _save_before_epoch_end(self) -> None:
        """The loop was left: if between an epoch's last step and the epoch's end, the checkpoint due there is taken."""
        if self._ends_epoch and self._draw is None:
            self._boundary.save_held(also=self.state.will_save)

    def _finish(self) -> None:
        """A leg that comes to its end by itself: the last checkpoint, the final record, and the best weights."""
        self._boundary.saves.settle()
        state, args, seconds = self.state, self.args, self.state.elapsed()
        metrics = self._final_metrics = {
            "train_runtime": seconds,
            "train_samples": state.samples_seen,
            "train_samples_per_second": state.samples_seen / seconds,
            "train_steps_per_second": state.global_step / seconds,
            "step": state.global_step,
        }
        microbatch = self._feed.samples_per_microbatch()
        if microbatch is not None:
            metrics["effective_batch_size"] = microbatch * args.gradient_accumulation_steps
        loss = self._meter.run_loss()
        if loss is not None:
            metrics["train_loss"] = loss
            self._boundary.note_end(loss)
        self._boundary.log(metrics, "final")
        self._saver.load_best_model()

    def _close(self, error: BaseException | None) -> None:
        """on_exception where due, then on_train_end, once. No collective: the other ranks may be gone."""
        on, control, metrics = self._on, self.control, self._final_metrics
        self.state.clock.stop()
        failures = _failures(self._boundary.saves.leave)
        result = self.result = TrainResult(
            global_step=self.state.global_step,
            reason=reason_of(error, control, self._exhausted),
            why=control.stop_reason if error is None else f"{type(error).__name__}: {error}",
            stopped_by=control.stopped_by,
            metrics=metrics,
            checkpoint=self._boundary.saves.newest,
        ).with_best(self.state, self._saver.path_of)
        failures += _failures(self._feed.close)
        if error is not None and on.exception:
            on.exception.fill(error)
            failures += on.exception.fire_all()
        if on.train_end:
            on.train_end.fill(result.reason, metrics, result.checkpoint)
            failures += on.train_end.fire_all()
        if self._legs is not None:
            goal = {"max_steps": self.args.max_steps, "num_train_epochs": self.args.num_train_epochs}
            is_final = result.reason in ("stopped", "aborted") and control.stop_is_final
            end = partial(self._legs.end, result.reason, result.stopped_by, result.global_step, metrics, result.why)
            failures += _failures(
                partial(self._note_end, partial(end, goal_given_up=goal if is_final else None), result)
            )
        for failure in failures:
            if error is None:
                raise failure
            error.add_note(f"and on the way out: {type(failure).__name__}: {failure}")

    def _note_end(self, end: Callable[[], None], result: TrainResult) -> None:
        assert self._legs is not None, "this is rank 0"
        safe = f"{result.checkpoint} and the logs are safe" if result.checkpoint else "no checkpoint was saved"
        how = f"how this leg ended ({result.reason} at step {result.global_step}) is not in there, but {safe}"
        with _writing(
            self._legs, f"{how}. Started again, the run goes on from its newest checkpoint and notes its end"
        ):
            end()

    def _relative(self, path: Path | None) -> str | None:
        if path is None:
            return None
        path, home = path.resolve(), self.args.directory.resolve()
        return path.relative_to(home).as_posix() if path.is_relative_to(home) else str(path)

    # -- steps --------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[StepBatch]:
        """The micro-batches of each step that is left to do. :meth:`step_end` is due before the next.

        Raises:
            EmptyDataset: if there is not a single batch.
        """
        on, feed = self._on, self._feed
        self._place = agreed_place(feed)
        if self._boundary.should_stop_now():
            return
        if self.state.evaluations_owed:
            self._boundary.run_due_actions(DueActions(evaluate=True))
        while not self._is_over():
            if not feed.started:
                self.state.epoch_is_cut = False  # a wish at the last epoch's end is no wish for this one
                if on.epoch_begin:
                    on.epoch_begin.fill(feed.epoch)
                    on.epoch_begin.fire()
            yield from self._rest_of_epoch()
            if self._boundary.stopping or self._is_cut_short():
                return
            if not feed.started:
                self._data_exhausted()
                return
            self._end_epoch()

    def _rest_of_epoch(self) -> Iterator[StepBatch]:
        if self.state.epoch_is_cut:  # at the end of the step that the leg goes on from
            return
        for draw in iter_steps(self._feed, self.args.gradient_accumulation_steps, self._loss_weight):
            if 0 < self.args.max_steps <= self.state.global_step:  # a loader that is longer than it said
                return
            self._plan_step(draw)
            if not self._is_rehearsed:  # once more: a loader has its state, and a callback all of its own, only now
                self._saver.rehearse()
                self._is_rehearsed = True
            if self._on.step_begin:
                self._on.step_begin.fire()
            self._draw = draw
            yield draw
            if self._draw is not None:
                raise ConfigurationError(
                    f"step {self.state.global_step + 1} did not end: call run.step_end(loss=…) after each batch for "
                    "which run.is_last_microbatch is true (an epoch's last step may have fewer batches than the others)"
                )
            if self._boundary.stopping or self.state.epoch_is_cut or self._is_cut_short():
                return

    def step_end(
        self,
        loss: torch.Tensor,
        *,
        grad_norm: torch.Tensor | None = None,
        lr: float | torch.Tensor | None = None,
    ) -> None:
        """The weights are updated: count the step, and do whatever is due.

        Args:
            loss: this rank's share of the step's loss, 0-dim. Over all ranks the shares are summed.
            grad_norm: total L2 norm before clipping, on all ranks, 0-dim.
            lr: the learning rate that this update used.
        """
        state, on, draw = self.state, self._on, self._draw
        if draw is None:
            raise ConfigurationError("run.step_end(): no step has begun; take a batch from the run first")
        self._draw = None
        self._buffers.share()
        self._meter.add(loss, grad_norm)
        self._meter.tokens += draw.tokens
        self._boundary.lr = lr
        state.global_step += 1
        state.epoch = self._place
        state.samples_seen += draw.samples
        state.num_input_tokens_seen += draw.tokens * self._world_size
        if on.step_end:
            on.step_end.fill(loss, grad_norm, lr)
            on.step_end.fire()
        if self._listens_to_metrics:
            self._report_metrics(loss, grad_norm)
        self._boundary.run_due_actions(self._due, epoch_ends=self._ends_epoch)
        if on.step_done:
            on.step_done.fill(state.global_step)
            on.step_done.fire()

    def _report_metrics(self, loss: torch.Tensor, grad_norm: torch.Tensor | None) -> None:
        """on_train_metrics: the one event whose payload costs a reduction and a wait each step."""
        metrics = {"loss": collectives.sum_floats([float(loss)], "the loss of a step")[0]}
        if grad_norm is not None:
            metrics["grad_norm"] = float(grad_norm)
        if self._boundary.lr is not None:
            metrics["learning_rate"] = float(self._boundary.lr)
        if self._on.train_metrics:
            self._on.train_metrics.fill(metrics)
            self._on.train_metrics.fire()

    def _plan_step(self, draw: StepBatch) -> None:
        """What the coming step's end will do, so that costly things are captured only then."""
        state, control, step = self.state, self.control, self.state.global_step + 1
        self._place, state.data_seconds = draw.place, draw.seconds
        self._ends_epoch = ends_epoch = self._place >= self._feed.epoch + 1
        is_final = self._is_last(step, self._place) and not ends_epoch  # else the epoch's end saves
        self._due = due = DueActions(
            log=self._logging.at_step(step) or (step == 1 and self.args.logging_first_step and bool(self._logging)),
            evaluate=self._evaluation.at_step(step),
            save=self._saving.at_step(step) or (is_final and bool(self._saving)),
        )
        later = self._due_at_epoch_end(step) if ends_epoch else _NOTHING
        # What this rank alone wishes counts once the others know of it: collectives hang on what is foreseen here.
        alone = self._world_size == 1
        state.will_log = due.log or later.log or (alone and control.should_log)
        state.will_evaluate = due.evaluate or later.evaluate or (alone and control.should_evaluate)
        state.will_save = due.save or later.save or (alone and control.should_save)

    # -- epochs -------------------------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        feed, on = self._feed, self._on
        if on.epoch_end:
            on.epoch_end.fill(feed.epoch)
            on.epoch_end.fire()
        due = self._due_at_epoch_end(self.state.global_step)
        feed.next_epoch()
        self.state.epoch = self._place = feed.position
        self._boundary.run_due_actions(due)

    def _due_at_epoch_end(self, step: int) -> DueActions:
        """What the end of this epoch asks for, if ``step`` is its last step."""
        done = self._feed.epoch + 1
        last = self._is_last(step, done)
        return DueActions(
            log=self._logging.at_epoch(done),
            evaluate=self._evaluation.at_epoch(done),
            save=self._saving.at_epoch(done) or (last and bool(self._saving)),
        )

    def _data_exhausted(self) -> None:
        """An epoch without a single batch."""
        if self.state.global_step == 0:
            raise EmptyDataset("the training data has not a single batch; look at the dataset, or at drop_last")
        self._exhausted = True
        self._boundary.run_due_actions(DueActions(save=bool(self._saving)))

    def _is_last(self, step: int, place: float) -> bool:
        """Whether the run goes no further than ``step`` finished steps, or ``place`` in the epochs."""
        return step >= self.args.max_steps if self.args.max_steps > 0 else place >= self.args.num_train_epochs

    def _is_cut_short(self) -> bool:
        """Whether the run is at its end in the middle of an epoch, which then does not end."""
        used_up = self._feed.started and self._place >= self._feed.epoch + 1  # its end is still to come
        return self._is_last(self.state.global_step, self._place) and not used_up

    def _is_over(self) -> bool:
        return self._boundary.stopping or self._is_cut_short()


@contextmanager
def _writing(legs: RunFile, what_now: str) -> Iterator[None]:
    """
    Raises:
        SaveFailed: if ``run.json`` cannot be written, say on a full disk; tells ``what_now``.
    """
    try:
        yield
    except OSError as error:
        raise SaveFailed(f"{legs.path} could not be written: {error}; {what_now}; make room first") from error


def _failures(work: Callable[[], object]) -> list[BaseException]:
    """Do ``work``; what it raises, if it does, is returned."""
    try:
        work()
    except BaseException as error:
        return [error]
    return []
