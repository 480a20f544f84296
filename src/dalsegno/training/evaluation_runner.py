"""EvaluationRunner: measures the model on every evaluation set, fires the events around each, and keeps the best.

::

    for each set: evaluate_begin → its batches → evaluate_end → log_step → log → evaluate
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from dalsegno.errors import UnknownName
from dalsegno.events.failures import note_failures, raise_first
from dalsegno.events.records import fire_record

from .evaluation import Evaluation
from .metric_checks import expect_metrics
from .parts import RunParts
from .snapshot import StateSnapshot


class EvaluationInterrupted(BaseException):
    """Raised to interrupt an evaluation that all ranks have agreed to stop. Not an ``Exception``, so that
    ``except Exception`` in a model or a callback does not swallow it."""


class EvaluationRunner:
    """Runs the evaluations of a run, as a part of a step or on demand."""

    def __init__(self, parts: RunParts, evaluations: Sequence[Evaluation]) -> None:
        self._args = parts.args
        self._dispatcher = parts.dispatcher
        self._state = parts.state
        self._flags = parts.flags
        self._control = parts.control
        self._callbacks = parts.callbacks
        self._evaluations = evaluations
        self._measured: tuple[int, dict[str, float]] = 0, {}  # step of the newest evaluation, and its metrics
        self._stop_requested: Callable[[], bool] | None = None  # during a step's evaluation only

    @property
    def has_sets(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self._evaluations)

    def metrics(self) -> dict[str, float]:
        """Metrics measured at the current step; empty if it was not evaluated."""
        step, metrics = self._measured
        return metrics if step == self._state.global_step else {}

    def set_metrics(self, metrics: Mapping[str, float]) -> None:
        """Set the metrics measured at the current step so far, in this leg or the previous one."""
        self._measured = self._state.global_step, dict(metrics)

    def evaluate(self) -> dict[str, float]:
        """Measure the model on each set. Collective."""
        metrics: dict[str, float] = {}
        for evaluation in self._evaluations:
            metrics |= self._run(evaluation, metrics, is_last=evaluation is self._evaluations[-1])
        return metrics

    def evaluate_step(self, stop_requested: Callable[[], bool]) -> bool:
        """Measure the model on each set as a part of the current step. Collective.

        If all ranks agree to stop meanwhile, the set in progress is undone, and it and those after it are left to the
        next leg: ``state.evaluations_owed`` names them.

        Args:
            stop_requested: collective, called between two batches.

        Returns:
            Whether every set was measured.
        """
        state = self._state
        if not state.evaluations_owed:
            state.evaluations_owed = [each.name for each in self._evaluations]
            self.set_metrics({})
        owed = [each for each in self._evaluations if each.name in state.evaluations_owed]
        for evaluation in owed:
            before = StateSnapshot(self._callbacks.bound, [*evaluation.affected, self._flags])
            try:
                metrics = self._run(evaluation, self.metrics(), stop_requested, is_last=evaluation is owed[-1])
            except EvaluationInterrupted:
                before.restore()
                return False
            self.set_metrics(self.metrics() | metrics)
            state.evaluations_owed.remove(evaluation.name)
        state.evaluations_owed.clear()  # also of sets that no longer exist
        self._note_best(self.metrics())
        return True

    def between_batches(self) -> None:
        """To be called between two batches of an evaluation, equally often on all ranks.

        Raises:
            EvaluationInterrupted: if this is a step's evaluation, and all ranks have agreed to stop.
        """
        if self._stop_requested is not None and self._stop_requested():
            raise EvaluationInterrupted

    def _run(
        self,
        evaluation: Evaluation,
        earlier: Mapping[str, float],
        stop_requested: Callable[[], bool] | None = None,
        *,
        is_last: bool,
    ) -> dict[str, float]:
        """``earlier``: metrics of the sets before this one."""
        dispatcher = self._dispatcher
        with self._announced(evaluation) as evaluated_weights:
            outer, self._stop_requested = self._stop_requested, stop_requested
            try:
                metrics = evaluation(self.between_batches)
            finally:
                self._stop_requested = outer
        fire_record(dispatcher, metrics, "eval", evaluated_weights)
        if dispatcher.evaluate:
            dispatcher.evaluate.fill(
                metrics, evaluation.name, evaluated_weights, all_metrics={**earlier, **metrics}, is_last=is_last
            )
            dispatcher.evaluate.fire()
        return metrics

    @contextmanager
    def _announced(self, evaluation: Evaluation) -> Iterator[str | None]:
        """Between on_evaluate_begin and on_evaluate_end, which fires in any case. Yields the name of the weights that
        callbacks have put into the model, None if they are its own."""
        begin = self._dispatcher.evaluate_begin
        try:
            begin.fill(evaluation.name)
            begin.fire()
            yield begin.context.evaluated_weights
        except BaseException as error:
            note_failures(error, self._announce_end(evaluation))
            raise
        raise_first(self._announce_end(evaluation))

    def _announce_end(self, evaluation: Evaluation) -> list[BaseException]:
        end = self._dispatcher.evaluate_end
        end.fill(evaluation.name)
        return end.fire_all()

    def _note_best(self, metrics: Mapping[str, float]) -> None:
        """Update the best metric; request a save if ``save`` contains ``OnBest()``."""
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
