"""Boundary: what happens between two steps. Log, evaluate, save, stop: in this order, on all ranks together.

::

    step_end → train_metrics → log_step → log → for each set: evaluate, log_step, log, on_evaluate
             → before_save → capture → save → step_done

So a captured state contains all that happened in its step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from . import ranks
from .agreement import Agreement, Source
from .args import TrainingArguments
from .dispatcher import Dispatcher
from .errors import UnknownName
from .meter import Meter
from .state import NO_WISHES, TrainerControl, TrainerState, Wishes
from .takeback import Takeback


class Evaluation(Protocol):
    """One evaluation set, and how to measure the model on it."""

    @property
    def name(self) -> str: ...

    def __call__(self) -> dict[str, float]:
        """The metrics, reduced over all ranks, under the names by which they are logged. Collective."""
        ...


class Saver(Protocol):
    """Where checkpoints go."""

    def path_of(self, step: int) -> Path:
        """The folder of that step's checkpoint."""
        ...

    def save(self, step: int, *, metrics: Mapping[str, float], is_best: bool) -> None:
        """Capture the state of every component and publish it. Collective."""
        ...

    def amend(self, step: int, *, metrics: Mapping[str, float], is_best: bool) -> None:
        """Note in that step's checkpoint, which is published, what only came out afterwards. Collective."""
        ...

    def load_best_model(self) -> None:
        """Put the best checkpoint's weights into the model, if that is wanted and there is one. Collective."""
        ...


class Due(NamedTuple):
    """What the schedules ask for."""

    log: bool = False
    evaluate: bool = False
    save: bool = False


class BrokenOff(BaseException):
    """Leads out of an evaluation that the ranks have agreed to break off. No ``Exception``: nobody shall catch it."""


class Boundary:
    """Does what is due or wished for between two steps."""

    def __init__(
        self,
        args: TrainingArguments,
        on: Dispatcher,
        state: TrainerState,
        control: TrainerControl,
        *,
        meter: Meter,
        saver: Saver,
        outside: Sequence[Source] = (),
    ) -> None:
        """``outside``: who else has wishes, beside the callbacks."""
        self._args = args
        self._on = on
        self._state = state
        self._control = control
        self._meter = meter
        self._saver = saver
        self._outside = outside
        self.evaluations: Sequence[Evaluation] = ()
        self.saved_step: int | None = None
        """Of the newest checkpoint."""
        self.metrics: dict[str, float] = {}
        """Of the newest evaluation."""
        self._may_break_off = False
        self.begin_leg()

    def begin_leg(self) -> None:
        """No decision of a former leg is left."""
        self._seconds_apart = self._args.saving.seconds_apart
        self._saved_at = time.monotonic()
        outside = [*self._outside, self._look_at_clock] if self._seconds_apart < math.inf else self._outside
        self._agreement = Agreement(self._control, outside, each_step=self._on.wishes_each_step())
        self._save_is_held = False
        self.lr: Any = None
        """What the newest update used."""
        self.leaving = False
        """All ranks have agreed to stop."""

    def leaves_at_once(self) -> bool:
        """Whether the leg is to end before it has done anything, say because a signal came while it was loading."""
        if self._agreement.stops():
            self._leave()
        return self.leaving

    def act(self, due: Due, *, epoch_ends: bool = False) -> None:
        """Do what is ``due``, and what callbacks wish as far as the ranks agree on it here.

        ``epoch_ends``: the end of the epoch follows at once. What is to be saved here is saved there, so that one
        checkpoint contains both, unless the leg ends here.
        """
        agreement = self._agreement
        wishes = agreement.now() if any(due) or epoch_ends else agreement.at_step()
        if due.log or wishes.log:
            self.log_training()
            wishes = wishes.and_also(agreement.now())
        if due.evaluate or wishes.evaluate:
            self._evaluate_step()
            wishes = wishes.and_also(agreement.now())
        if wishes.stop or wishes.abort:
            self._leave()
        if wishes.end_epoch:
            self._state.epoch_is_cut = True
        save = due.save or wishes.save or self._save_is_held or self.leaving
        self._save_is_held = save and epoch_ends and not self.leaving
        if save and not self._save_is_held and not wishes.abort:
            self.save()

    def _leave(self) -> None:
        self.leaving = True
        self._agreement.share_reason()

    def log_training(self) -> None:
        """The record of the steps since the last one. Collective."""
        logs: dict[str, Any] = self._meter.take()
        if self.lr is not None:
            logs["learning_rate"] = float(self.lr)
        if self._meter.run_tokens:
            self._state.num_input_tokens_seen = logs["tokens"] = self._meter.run_tokens
        self.log(logs, "train")

    def log(self, logs: dict[str, Any], kind: str) -> None:
        """Let callbacks add to the record, then hand it to those that write it."""
        on = self._on
        if on.log_step:
            on.log_step.fill(logs, kind)
            on.log_step.fire()
        if on.log:
            on.log.fill(logs, kind)
            on.log.fire()

    def evaluate(self) -> dict[str, float]:
        """Measure the model on each evaluation set. Collective."""
        everything: dict[str, float] = {}
        for evaluation in self.evaluations:
            self._begin(evaluation)
            everything |= self._report(evaluation, evaluation())
        return everything

    def _evaluate_step(self) -> None:
        """The same as a part of this step, which the next leg completes if somebody outside wishes to stop."""
        state = self._state
        if not state.evaluations_owed:
            state.evaluations_owed, self.metrics = [each.name for each in self.evaluations], {}
        for evaluation in [each for each in self.evaluations if each.name in state.evaluations_owed]:
            take_back = Takeback(self._on.callbacks)
            try:
                self._begin(evaluation)
                self._may_break_off = True
                metrics = evaluation()
            except BrokenOff:
                take_back()
                return
            finally:
                self._may_break_off = False
            self.metrics |= self._report(evaluation, metrics)
            state.evaluations_owed.remove(evaluation.name)
        state.evaluations_owed.clear()  # of sets that are gone
        self._note_best(self.metrics)
        if self.saved_step == state.global_step:  # by the leg that broke off, so it could not know
            self._saver.amend(self.saved_step, metrics=self.metrics, is_best=self._is_best())

    def between_batches(self) -> None:
        """To be called between two batches of an evaluation, equally often on all ranks.

        Raises:
            BrokenOff: if it is a step's evaluation, and all ranks have agreed to stop.
        """
        if self._may_break_off and self._agreement.stops_at_batch():
            raise BrokenOff

    def _begin(self, evaluation: Evaluation) -> None:
        on = self._on
        if on.evaluate_begin:
            on.evaluate_begin.fill(evaluation.name)
            on.evaluate_begin.fire()

    def _report(self, evaluation: Evaluation, metrics: dict[str, float]) -> dict[str, float]:
        on = self._on
        self.log(metrics, "eval")
        if on.evaluate:
            on.evaluate.fill(metrics, evaluation.name)
            on.evaluate.fire()
        return metrics

    def _note_best(self, metrics: Mapping[str, float]) -> None:
        args, state, name = self._args, self._state, self._args.best_metric_name
        if name not in metrics:
            if metrics and args.metric_for_best_model is not None:
                raise UnknownName("metric_for_best_model", name, metrics)
            return
        value, best = metrics[name], state.best_metric
        if math.isnan(value) or (best is not None and (value <= best if args.best_is_greater else value >= best)):
            return
        state.best_metric, state.best_global_step = value, state.global_step
        if args.saving.on_best:
            self._control.should_save = True

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one. Collective."""
        on, step = self._on, self._state.global_step
        self._saved_at = time.monotonic()
        if self.saved_step == step:
            return
        path, is_best = self._saver.path_of(step), self._is_best()
        if on.before_save:
            on.before_save.fill(path, step)
            on.before_save.fire()
        self._saver.save(step, metrics=self.metrics, is_best=is_best)
        self.saved_step = step
        if on.save:
            on.save.fill(path, step, is_best)
            on.save.fire()

    def _look_at_clock(self) -> Wishes:
        """A wish to save, once the newest checkpoint is old enough. By rank 0's clock: one is enough."""
        is_time = ranks.rank() == 0 and time.monotonic() - self._saved_at >= self._seconds_apart
        return Wishes(save=True) if is_time else NO_WISHES

    def _is_best(self) -> bool:
        """Whether this step's checkpoint, which is there or about to be, is the best; if so, that is remembered."""
        state = self._state
        if state.best_metric is None or state.best_global_step != state.global_step:
            return False
        path = self._saver.path_of(state.global_step)
        state.best_model_checkpoint = path.relative_to(self._args.directory).as_posix()
        return True
