"""Boundary: what happens between two steps. Log, evaluate, save, stop: in this order, on all ranks together.

::

    step_end → train_metrics → log_step → log → for each set: evaluate, log_step, log, on_evaluate
             → before_save → capture → save → step_done

So a captured state contains all that happened in its step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .agreement import Agreement
from .args import TrainingArguments
from .dispatcher import Dispatcher
from .errors import UnknownName
from .meter import Meter
from .state import TrainerControl, TrainerState


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

    def load_best_model(self) -> None:
        """Put the best checkpoint's weights into the model, if that is wanted and there is one. Collective."""
        ...


class Due(NamedTuple):
    """What the schedules ask for."""

    log: bool = False
    evaluate: bool = False
    save: bool = False


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
    ) -> None:
        self._args = args
        self._on = on
        self._state = state
        self._control = control
        self._meter = meter
        self._saver = saver
        self.evaluations: Sequence[Evaluation] = ()
        self.saved_step: int | None = None
        """Of the newest checkpoint."""
        self.begin_leg()

    def begin_leg(self) -> None:
        """No wish and no decision of a former leg is left."""
        self._control.clear()
        self._agreement = Agreement(self._control)
        self._metrics: dict[str, float] = {}  # of the newest evaluations
        self.lr: Any = None
        """What the newest update used."""
        self.leaving = False
        """All ranks have agreed to stop."""

    def act(self, due: Due) -> None:
        """Do what is ``due``, and what callbacks wish as far as the ranks agree on it here."""
        control, agreed = self._control, self._agreement.at_step()
        if due.log or (agreed and control.should_log):
            self.log_training()
            agreed = self._agreement.now()
        if due.evaluate or (agreed and control.should_evaluate):
            self.evaluate()
            agreed = self._agreement.now()
        if agreed and control.should_training_stop:
            self.leaving = True
            self._agreement.share_reason()
        if agreed and control.should_epoch_stop:
            self._state.epoch_is_cut, control.should_epoch_stop = True, False
        save = due.save or (agreed and control.should_save) or self.leaving
        if save and not (agreed and control.should_abort_without_save):
            self.save()

    def log_training(self) -> None:
        """The record of the steps since the last one. Collective."""
        logs: dict[str, Any] = self._meter.take()
        if self.lr is not None:
            logs["learning_rate"] = float(self.lr)
        if self._meter.run_tokens:
            self._state.num_input_tokens_seen = logs["tokens"] = self._meter.run_tokens
        self.log(logs, "train")
        self._control.should_log = False

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
        """Measure the model on each evaluation set, and keep the best metric. Collective."""
        on = self._on
        everything: dict[str, float] = {}
        for evaluation in self.evaluations:
            if on.evaluate_begin:
                on.evaluate_begin.fill(evaluation.name)
                on.evaluate_begin.fire()
            metrics = evaluation()
            everything |= metrics
            self.log(metrics, "eval")
            if on.evaluate:
                on.evaluate.fill(metrics, evaluation.name)
                on.evaluate.fire()
        self._control.should_evaluate = False
        if everything:
            self._metrics = everything
            self._note_best(everything)
        return everything

    def _note_best(self, metrics: Mapping[str, float]) -> None:
        args, state, name = self._args, self._state, self._args.best_metric_name
        if name not in metrics:
            if args.metric_for_best_model is not None:
                raise UnknownName("metric_for_best_model", name, metrics)
            return
        value, best = metrics[name], state.best_metric
        if math.isnan(value) or (best is not None and (value <= best if args.best_is_greater else value >= best)):
            return
        state.best_metric, state.best_global_step = value, state.global_step
        if args.load_best_model_at_end:
            self._control.should_save = True

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one. Collective."""
        state, on, step = self._state, self._on, self._state.global_step
        path = self._saver.path_of(step)
        is_best = state.best_metric is not None and state.best_global_step == step
        if is_best:
            state.best_model_checkpoint = path.relative_to(self._args.directory).as_posix()
        self._control.should_save = False
        if self.saved_step == step:
            return
        if on.before_save:
            on.before_save.fill(path, step)
            on.before_save.fire()
        self._saver.save(step, metrics=self._metrics, is_best=is_best)
        self.saved_step = step
        if on.save:
            on.save.fill(path, step, is_best)
            on.save.fire()
