"""Boundary: what happens between two steps. Log, evaluate, save, stop: in this order, on all ranks together.

::

    step_end → train_metrics → log_step → log
             → for each set: evaluate_begin, its batches, evaluate_end, log_step, log, evaluate
             → save (of the one before) → before_save → capture → step_done

So a captured state contains all that happened in its step. Its bytes go to the disk beside the steps that follow, and
on_save fires at the first boundary after it is published.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from dalsegno.args import TrainingArguments
from dalsegno.distributed import collectives
from dalsegno.errors import UnknownName
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.state import NO_REQUESTS, ControlRequests, TrainerControl, TrainerState

from .control_sync import ControlSync, RequestSource
from .metric_checks import expect_metrics
from .metrics import MetricAccumulator
from .save_coordinator import SaveCoordinator, Saver
from .snapshot import StateSnapshot

logger = logging.getLogger("dalsegno")


class Evaluation(Protocol):
    """One evaluation set, and how to measure the model on it."""

    @property
    def name(self) -> str: ...

    def __call__(self) -> dict[str, float]:
        """The metrics, reduced over all ranks, under the names by which they are logged. Collective."""
        ...


class DueActions(NamedTuple):
    """What the schedules ask for."""

    log: bool = False
    evaluate: bool = False
    save: bool = False


class EvaluationInterrupted(BaseException):
    """Leads out of an evaluation that the ranks have agreed to break off. No ``Exception``: nobody shall catch it."""


class StepBoundary:
    """Does what is due or wished for between two steps."""

    def __init__(
        self,
        args: TrainingArguments,
        on: Dispatcher,
        state: TrainerState,
        control: TrainerControl,
        *,
        meter: MetricAccumulator,
        saver: Saver,
        outside: Sequence[RequestSource] = (),
    ) -> None:
        """``outside``: who else has wishes, beside the callbacks."""
        self._args = args
        self._on = on
        self._state = state
        self._control = control
        self._meter = meter
        self._outside = outside
        self.saves = SaveCoordinator(args, on, state, saver, is_called_off=lambda: self._agreement.abort_requested())
        self.evaluations: Sequence[Evaluation] = ()
        self._measured: tuple[int, dict[str, float]] = 0, {}  # the step of the newest evaluation, and what it found
        self._may_break_off = False
        self.begin_leg()

    def begin_leg(self) -> None:
        """No decision of a former leg is left."""
        self._seconds_apart = self._args.saving.interval_s
        self._saved_at = time.monotonic()
        outside = [*self._outside, self.saves.poll]
        if self._seconds_apart < math.inf:
            outside.append(self._poll_clock)
        self._agreement = ControlSync(self._control, outside, each_step=self._on.wishes_each_step())
        self.saves.begin_leg()
        self._save_is_held = False
        self.lr: Any = None
        """What the newest update used."""
        self._broken_since: int | None = None  # the first of the last records whose loss was NaN or infinite
        self._has_warned = False
        self.stopping = False
        """All ranks have agreed to stop."""

    def should_stop_now(self) -> bool:
        """Whether the leg is to end before it has done anything, say because a signal came while it was loading."""
        if self._agreement.stop_requested():
            self._stop()
        return self.stopping

    def run_due_actions(self, due: DueActions, *, epoch_ends: bool = False) -> None:
        """Do what is ``due``, and what callbacks wish as far as the ranks agree on it here.

        ``epoch_ends``: the end of the epoch follows at once. What is to be saved here is saved there, so that one
        checkpoint contains both, unless the leg ends here.
        """
        agreement = self._agreement
        wishes = agreement.sync() if any(due) or epoch_ends else agreement.poll()
        if due.log or wishes.log:
            self.log_training()
            wishes = wishes.merge(agreement.sync())
        if due.evaluate or wishes.evaluate:
            self._evaluate_step()
            wishes = wishes.merge(agreement.sync())
        if wishes.stop or wishes.abort:
            self._stop()
        if wishes.abort:
            self.saves.skip_final_save()
        if wishes.end_epoch:
            self._state.epoch_is_cut = True
        if wishes.save_done:
            self.saves.finalize()
        save = due.save or wishes.save or self._save_is_held or self.stopping
        self._save_is_held = save and epoch_ends and not self.stopping
        if save and not self._save_is_held and not wishes.abort:
            self._save()
        elif not self.stopping:
            self.saves.prepare()

    def save_held(self, *, also: bool) -> None:
        """The epoch's end, for which :meth:`act` has held a checkpoint back, does not come. ``also``: one that would
        only fall due there. Collective."""
        if self._save_is_held or also:
            self._save_is_held = False
            self._save()

    def _save(self) -> None:
        """A checkpoint of this step; or the end without one, where a handler of on_before_save calls it off."""
        control = self._control
        asked = control.stop_reason, control.stopped_by, control.stop_is_final
        control.stop_reason = control.stopped_by = None  # so that who calls it off is named
        self._saved_at = time.monotonic()
        self.saves.save(self._metrics())
        if control.should_abort_without_save:
            self._stop()
            self.saves.skip_final_save()
        else:
            control.stop_reason, control.stopped_by, control.stop_is_final = asked

    def _stop(self) -> None:
        self.stopping = True
        self._agreement.broadcast_reason()

    def log_training(self) -> None:
        """The record of the steps since the last one. Collective."""
        logs: dict[str, Any] = self._meter.reduce_and_reset()
        if self.lr is not None:
            logs["learning_rate"] = float(self.lr)
        if self._meter.run_tokens:
            self._state.num_input_tokens_seen = logs["tokens"] = self._meter.run_tokens
        loss = logs.get("loss", 0.0)
        self.log(logs, "train")
        self._note_loss(loss)

    def _note_loss(self, loss: float) -> None:
        """Of a record. Where nobody ends the run for it, it is said."""
        if math.isfinite(loss):
            self._broken_since = None
        elif self._broken_since is None:
            self._broken_since = self._state.global_step
            if not self._control.should_training_stop:
                self._warn(
                    f"the loss is {loss} in the record of step {self._broken_since}; CheckLoss() ends such a run"
                )

    def note_end(self, loss: float) -> None:
        """The run ends by itself, and this is the mean loss of all its steps."""
        if math.isfinite(loss) or self._control.should_training_stop:
            return
        if self._broken_since is not None:
            since = f"since the record of step {self._broken_since}"
            self._warn(f"the run is at its end, but the loss has been NaN or infinite {since}: look at the weights")
        elif not self._has_warned:
            self._warn(f"the run is at its end, but the mean loss of its steps is {loss}: look at the weights")

    def _warn(self, text: str) -> None:
        self._has_warned = True
        if collectives.rank() == 0:
            logger.warning("%s", text)

    def log(self, logs: dict[str, Any], kind: str, evaluated_weights: str | None = None) -> None:
        """Let callbacks add to the record, then hand it to those that write it."""
        on = self._on
        if on.log_step:
            on.log_step.fill(logs, kind, evaluated_weights)
            on.log_step.fire()
        if on.log:
            on.log.fill(logs, kind, evaluated_weights)
            on.log.fire()

    def evaluate(self) -> dict[str, float]:
        """Measure the model on each evaluation set. Collective."""
        everything: dict[str, float] = {}
        for evaluation in self.evaluations:
            with self._announced(evaluation) as evaluated_weights:
                metrics = evaluation()
            everything |= self._report(evaluation, metrics, evaluated_weights)
        return everything

    def _evaluate_step(self) -> None:
        """The same as a part of this step, which the next leg completes if somebody outside wishes to stop."""
        state = self._state
        if not state.evaluations_owed:
            state.evaluations_owed = [each.name for each in self.evaluations]
            self.note_measured({})
        for evaluation in [each for each in self.evaluations if each.name in state.evaluations_owed]:
            take_back = StateSnapshot(self._on.callbacks)
            try:
                with self._announced(evaluation) as evaluated_weights:
                    self._may_break_off = True
                    metrics = evaluation()
            except EvaluationInterrupted:
                take_back()
                return
            finally:
                self._may_break_off = False
            self.note_measured(self._metrics() | self._report(evaluation, metrics, evaluated_weights))
            state.evaluations_owed.remove(evaluation.name)
        state.evaluations_owed.clear()  # of sets that are gone
        self._note_best(self._metrics())
        self.saves.amend(self._metrics())

    def note_measured(self, metrics: Mapping[str, float]) -> None:
        """What an evaluation has found at this step so far, in this leg or the one before."""
        self._measured = self._state.global_step, dict(metrics)

    def _metrics(self) -> dict[str, float]:
        """Of this step; empty if it was not evaluated. A checkpoint has no other step's."""
        step, metrics = self._measured
        return metrics if step == self._state.global_step else {}

    def between_batches(self) -> None:
        """To be called between two batches of an evaluation, equally often on all ranks.

        Raises:
            BrokenOff: if it is a step's evaluation, and all ranks have agreed to stop.
        """
        if self._may_break_off and self._agreement.stop_requested_at_batch():
            raise EvaluationInterrupted

    @contextmanager
    def _announced(self, evaluation: Evaluation) -> Iterator[str | None]:
        """Between on_evaluate_begin and on_evaluate_end, which comes whatever happens. Gives whose weights it is that
        are in the model, if they are not its own."""
        begin = self._on.evaluate_begin
        try:
            begin.fill(evaluation.name)
            begin.fire()
            yield begin.context.evaluated_weights
        except BaseException as error:
            for failure in self._announce_end(evaluation):
                error.add_note(f"and on the way out: {type(failure).__name__}: {failure}")
            raise
        for failure in self._announce_end(evaluation):
            raise failure

    def _announce_end(self, evaluation: Evaluation) -> list[BaseException]:
        self._on.evaluate_end.fill(evaluation.name)
        return self._on.evaluate_end.fire_all()

    def _report(
        self, evaluation: Evaluation, metrics: dict[str, float], evaluated_weights: str | None
    ) -> dict[str, float]:
        on = self._on
        self.log(metrics, "eval", evaluated_weights)
        if on.evaluate:
            on.evaluate.fill(metrics, evaluation.name, evaluated_weights)
            on.evaluate.fire()
        return metrics

    def _note_best(self, metrics: Mapping[str, float]) -> None:
        args, state, name = self._args, self._state, self._args.best_metric_name
        if metrics:
            expect_metrics(args, metrics)
        if name not in metrics:
            if metrics and args.metric_for_best_model is not None:
                raise UnknownName("metric_for_best_model", name, metrics)
            return
        value, best = float(metrics[name]), state.best_metric
        if math.isnan(value) or (best is not None and (value <= best if args.best_is_greater else value >= best)):
            return
        state.best_metric, state.best_global_step = value, state.global_step
        if args.saving.on_best:
            self._control.should_save = True

    def _poll_clock(self) -> ControlRequests:
        """A wish to save, once the newest checkpoint is old enough. By rank 0's clock: one is enough."""
        is_time = collectives.rank() == 0 and time.monotonic() - self._saved_at >= self._seconds_apart
        return ControlRequests(save=True) if is_time else NO_REQUESTS
