"""Evaluation: measures the model on every evaluation set, fires the events around each, and keeps the best.

::

    for each set: evaluate_begin → its batches → evaluate_end → log_step → log → evaluate

``EvaluationRunner`` runs the sets. ``LossEvaluation`` and ``UserEvaluation`` measure one set: by its mean loss, or by a
function of the user's. ``evaluation_undo`` undoes an evaluation that is interrupted.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain, repeat, zip_longest
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dalsegno.args import TrainingArguments
from dalsegno.data import EvalLoader, sample_count, to_device
from dalsegno.data.step_batch import LossWeight, MicrobatchLoader, iter_steps
from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.inference import evaluating
from dalsegno.distributed.layout import Layout
from dalsegno.distributed.rng import RandomState
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events.callback import Callback
from dalsegno.events.dispatcher import note_failures, raise_first
from dalsegno.events.table import Event
from dalsegno.policies.retention import Best, rules_of
from dalsegno.stateful.component import Stateful

from .run_parts import RunParts
from .train_step import EvaluationForward

logger = logging.getLogger("dalsegno")


class EvaluationInterrupted(BaseException):
    """Raised to interrupt an evaluation that all ranks have agreed to stop. Not an ``Exception``, so that
    ``except Exception`` in a model or a callback does not swallow it."""


class EvaluationRunner:
    """Runs the evaluations of a run, as a part of a step or on demand."""

    def __init__(self, parts: RunParts, evaluations: Sequence[Evaluation]) -> None:
        self._parts = parts
        self._dispatcher = parts.dispatcher
        self._state = parts.state
        self._evaluations = evaluations
        self._measured: tuple[int, dict[str, float]] = 0, {}  # step of the newest evaluation, and its metrics
        self._stop_requested: Callable[[], bool] | None = None  # during a step's evaluation only
        self._observers: list[Callable[[int], None]] = []  # of the evaluation in progress
        self._batches = 0  # that it has measured

    @property
    def has_sets(self) -> bool:
        return bool(self._evaluations)

    def metrics(self) -> dict[str, float]:
        """Metrics measured at the current step; empty if it was not evaluated."""
        step, metrics = self._measured
        return metrics if step == self._state.global_step else {}

    def set_metrics(self, metrics: Mapping[str, float]) -> None:
        """Set the metrics measured at the current step so far, in this leg or the previous one."""
        self._measured = self._state.global_step, dict(metrics)

    def evaluate(self, evaluations: Sequence[Evaluation] | None = None) -> dict[str, float]:
        """Measure the model on each set; None: on those of the run. Collective."""
        metrics: dict[str, float] = {}
        evaluations = self._evaluations if evaluations is None else evaluations
        for evaluation in evaluations:
            metrics |= self._run(evaluation, metrics, is_last=evaluation is evaluations[-1])
        return metrics

    def evaluate_step(self, stop_requested: Callable[[], bool]) -> bool:
        """Measure the model on each set as a part of the current step; returns whether every set was measured.
        Collective, as ``stop_requested`` is, which is called between two batches.

        If all ranks agree to stop meanwhile, the set in progress is undone, and it and those after it are left to the
        next leg: ``state.evaluations_owed`` names them.
        """
        state = self._state
        if not state.evaluations_owed:
            state.evaluations_owed = [each.name for each in self._evaluations]
            self.set_metrics({})
        owed = [each for each in self._evaluations if each.name in state.evaluations_owed]
        for evaluation in owed:
            undo = evaluation_undo(self._parts.callbacks.bound, [*evaluation.affected, self._parts.flags])
            try:
                metrics = self._run(evaluation, self.metrics(), stop_requested, is_last=evaluation is owed[-1])
            except EvaluationInterrupted:
                undo()
                return False
            self.set_metrics(self.metrics() | metrics)
            state.evaluations_owed.remove(evaluation.name)
        state.evaluations_owed.clear()  # also of sets that no longer exist
        self._note_best(self.metrics())
        return True

    def between_batches(self) -> None:
        """To be called between two batches of an evaluation, equally often on all ranks. Interrupts a step's
        evaluation, if all ranks have agreed to stop."""
        for observe in self._observers:
            observe(self._batches)
        self._batches += 1
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
        begin, end = dispatcher.evaluate_begin, dispatcher.evaluate_end
        try:
            begin.fill(evaluation.name, evaluation.batches)
            begin.fire()
            evaluated_weights = begin.context.evaluated_weights  # as callbacks have put them into the model
            outer, self._stop_requested = self._stop_requested, stop_requested
            self._observers, self._batches = begin.context.between_batches, 0
            try:
                metrics = evaluation(self.between_batches)
            finally:
                self._stop_requested, self._observers = outer, []
        except BaseException as error:
            end.fill(evaluation.name)
            note_failures(error, end.fire_all())
            raise
        end.fill(evaluation.name)
        raise_first(end.fire_all())
        dispatcher.fire_record(metrics, "eval", evaluated_weights)
        dispatcher.evaluate.fire_with(
            metrics, evaluation.name, evaluated_weights, all_metrics={**earlier, **metrics}, is_last=is_last
        )
        return metrics

    def _note_best(self, metrics: Mapping[str, float]) -> None:
        args, state, name = self._parts.args, self._state, self._parts.args.best_metric_name
        if not metrics:
            return
        for rule in _best_rules(args):
            needed = rule.metric or name
            if not {needed, f"eval_{needed}"} & metrics.keys():
                raise UnknownName(f"metric in keep={args.keep!r}:", needed, metrics)
        if name not in metrics:
            if args.metric_for_best_model is not None:
                raise UnknownName("metric_for_best_model", name, metrics)
            return
        value, best = float(metrics[name]), state.best_metric
        if math.isnan(value) or (best is not None and (value <= best if args.best_is_greater else value >= best)):
            return
        state.best_metric, state.best_global_step = value, state.global_step
        if args.saving.on_best:
            self._parts.control.should_save = True


BetweenBatches = Callable[[], None]
"""Called between two batches of an evaluation, equally often on all ranks. An exception that it raises interrupts the
evaluation."""


@dataclass(frozen=True, slots=True)
class LossEvaluation:
    """Metrics ``<prefix>_loss``, ``_runtime``, ``_samples_per_second``: over all ranks, each sample once.

    The prefix is ``eval`` for the only set, ``eval_<name>`` if there are several.
    """

    name: str
    prefix: str
    loader: EvalLoader
    _: KW_ONLY
    parts: RunParts
    forward: EvaluationForward
    device: torch.device
    loss_weight: LossWeight | None
    affected: Sequence[Stateful]

    @property
    def batches(self) -> int | None:
        """Batches on this rank; None: unknown."""
        return self.loader.length()

    def __call__(self, between_batches: BetweenBatches, kept: list[Any] | None = None) -> dict[str, float]:
        """Run the model over the whole set, in evaluation mode. Collective. ``kept`` gets each batch's outputs."""
        began = time.monotonic()
        with self.loader.evaluated() as loader, evaluating(*self.forward.modules):
            loss_sum, weight, samples = self._sums(loader, between_batches, kept)
        seconds = time.monotonic() - began
        (loss_sum,) = self.parts.layout.sum_floats([loss_sum], "the loss of an evaluation")
        return {
            f"{self.prefix}_loss": loss_sum / weight if weight else float("nan"),
            f"{self.prefix}_runtime": seconds,
            f"{self.prefix}_samples_per_second": samples / seconds,
        }

    def _sums(
        self, loader: MicrobatchLoader, between_batches: BetweenBatches, kept: list[Any] | None
    ) -> tuple[float, float, int]:
        """This rank's weighted sum of losses; the weights and the samples of all ranks."""
        dispatcher, weight, samples = self.parts.dispatcher, 0.0, 0
        losses: list[torch.Tensor] = []
        steps = iter_steps(loader, repeat(1), self.parts.layout, self.loss_weight)
        first = next(steps, None)
        self.loader.check_beginning(self.name, None if first is None else first.microbatches[0].batch)
        for index, step_batch in enumerate(chain([] if first is None else [first], steps)):
            between_batches()
            batch = to_device(step_batch.microbatches[0].batch, self.device)
            loss, outputs = self.forward(batch)
            if step_batch.weights[0]:  # padding does not count, not even a NaN
                losses.append(accelerator.wide(loss) * step_batch.weights[0])
            if kept is not None:
                kept.append(_rows_of(outputs, sample_count(batch), step_batch.microbatches[0].samples))
            dispatcher.prediction_step.fire_with(batch, outputs, index, step_batch.microbatches[0].samples)
            weight += step_batch.total
            samples += step_batch.samples
        return float(torch.stack(losses).sum()) if losses else 0.0, weight, samples


def _rows_of(outputs: Any, rows_in_batch: int, samples: int) -> Any:
    """A batch's outputs without the loss, on the CPU: the rows of its true samples of tensors with a row for each,
    None in place of all else."""
    rest = {name: value for name, value in outputs.items() if name != "loss"}
    rest = rest["outputs"] if rest.keys() == {"outputs"} else rest
    if isinstance(rest, Mapping):
        rest = {name: value for name, value in rest.items() if name != "loss"}

    def rows(leaf: Any) -> Any:
        has_rows = isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == rows_in_batch
        return leaf[:samples].detach().cpu() if has_rows else None

    return tree_map(rows, rest)


def joined_outputs(kept: Sequence[Any], layout: Layout) -> Any:
    """The outputs of all samples on all ranks, in the order of a map dataset. Collective. A tensor whose other
    dimensions differ between batches becomes a list of the samples' tensors; what has no rows in some batch, None."""
    of_ranks = layout.of_data_ranks(collectives.gather([*kept], "the outputs of a prediction"))
    flat = [tree_flatten(each) for batches in zip_longest(*of_ranks) for each in batches if each is not None]
    if not flat:
        return None
    leaves = zip(*(each for each, _ in flat), strict=True)
    return tree_unflatten([_joined(parts) for parts in leaves], flat[0][1])


def _joined(parts: Sequence[torch.Tensor | None]) -> Any:
    tensors = [each for each in parts if each is not None]
    if len(tensors) < len(parts):
        return None
    full = [each for each in tensors if len(each)]
    if len({each.shape[1:] for each in full}) > 1:
        return [row for each in full for row in each]
    return torch.cat(full) if full else None


class UserEvaluation:
    """The argument ``evaluate`` of ``dalsegno.Run``."""

    name = "eval"
    batches: int | None = None
    affected: Sequence[Stateful] = ()

    def __init__(self, function: Callable[[], Mapping[str, float]]) -> None:
        self._function = function

    def __call__(self, between_batches: BetweenBatches) -> dict[str, float]:
        """``between_batches`` is not called here: the function calls ``run.between_batches()``."""
        metrics: Any = self._function()
        try:
            return {str(name): _number(value) for name, value in metrics.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f'evaluate= returned {metrics!r}; it must return numbers by name: {{"eval_loss": 0.7}}'
            ) from error


Evaluation = LossEvaluation | UserEvaluation
"""One evaluation set, and how the model is measured on it. A call is collective, and returns the metrics by the names
under which they are logged, reduced over all ranks. ``affected``: objects whose state it may change, besides
callbacks."""


def _number(value: Any) -> float:
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, (int, float)):
        raise TypeError(f"{number!r} is not a number")
    return number


_NO_SET = "there is no evaluation set: pass eval_dataset= or eval_dataloader= (to ds.Run: evaluate=)"
_MAX_SEARCHED = 10_000
"""Steps: a longer run is not searched for one that is both saved and evaluated."""


def expect_evaluations(args: TrainingArguments, callbacks: Iterable[Callback], *, has_sets: bool) -> None:
    """Warn if evaluations are needed, but none is due. To be called before a leg trains."""
    waiting = [callback.key for callback in callbacks if callback.needs_evaluations]
    if args.keep is not None and _best_rules(args):
        waiting.append(f"keep={args.keep!r}")
    if args.eval_on_save:
        waiting.append("eval_on_save=True")
    if not waiting:
        idle = [f"{callback.key} does nothing" for callback in callbacks if callback.only_at_evaluations]
        default = TrainingArguments.eval_steps, TrainingArguments.eval_strategy
        if args.evaluation and (args.eval_steps, args.eval_strategy) != default:
            idle.append(f"evaluations ({args.evaluation}) are not made")
        if idle and not has_sets and collectives.rank() == 0:
            logger.warning("%s: %s", ", ".join(idle), _NO_SET)
        return
    if not has_sets:
        raise ConfigurationError(f"{waiting[0]} needs evaluations, and {_NO_SET}")
    if args.eval_on_save:
        return
    if not args.evaluation:
        logger.warning("%s needs evaluations, but none is scheduled: set eval_steps", waiting[0])
    elif _best_rules(args) and _never_meet(args):
        logger.warning(
            "keep=%r: no checkpoint is due at a step that is evaluated (saving %s, evaluating %s), so none is kept as "
            "one of the best; add OnBest() to save=, or make save_steps a multiple of eval_steps",
            args.keep,
            args.saving,
            args.evaluation,
        )


def _never_meet(args: TrainingArguments) -> bool:
    """Whether both schedules count steps only, and no step of the run is due for both."""
    saving, evaluation, last = args.saving, args.evaluation, args.max_steps
    if saving.on_best or saving.interval_s < math.inf or not 0 < last <= _MAX_SEARCHED:
        return False
    if any(trigger.at_epoch(epoch) for trigger in (saving, evaluation) for epoch in range(1, last + 1)):
        return False
    return not any(evaluation.at_step(step) and (step == last or saving.at_step(step)) for step in range(1, last + 1))


def _best_rules(args: TrainingArguments) -> list[Best]:
    rules = () if args.keep is None else rules_of(args.keep)
    return [rule for rule in rules if isinstance(rule, Best)]


_EVALUATION_EVENTS = {
    Event.EVALUATE_BEGIN,
    Event.BEFORE_FORWARD,
    Event.AFTER_FORWARD,
    Event.PREDICTION_STEP,
    Event.EVALUATE_END,
}


def evaluation_undo(callbacks: Iterable[Callback], others: Iterable[Stateful]) -> Callable[[], None]:
    """A function that undoes what an evaluation changes from now on, if it is interrupted.

    Another leg repeats the evaluation from its first batch. So random numbers that it drew, and changes to the state of
    callbacks and of ``others`` are undone. An evaluation changes neither model nor optimizer.

    Costs about 0.1 ms, and a ``state_dict`` of each callback that takes part in evaluations, and of ``others``.
    """
    generators = RandomState(0)
    numbers = generators.state_dict()  # a copy in itself
    affected = [each for each in callbacks if not _EVALUATION_EVENTS.isdisjoint(each.handled_events())]
    stateful = [*(each for each in affected if isinstance(each, Stateful)), *others]
    states = [(each, tree_map(_copied, each.state_dict())) for each in stateful]

    def undo() -> None:
        for each, state in states:
            each.load_state_dict(state)
        generators.load_state_dict(numbers)

    return undo


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
