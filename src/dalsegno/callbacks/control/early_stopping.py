"""EarlyStopping, OptunaPruning: stop a run by a metric of its evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypedDict

from dalsegno.callbacks.argument_checks import number, one_of, text, whole
from dalsegno.errors import Locked, UnknownName
from dalsegno.events import Callback, contexts
from dalsegno.stateful.schema import Count
from dalsegno.system.imports import require_extra


class EarlyStoppingState(TypedDict):
    best: float | None
    best_step: int
    bad: Count


class EarlyStopping(Callback):
    """Stops training, with a checkpoint, when a metric has not improved in ``patience`` consecutive evaluations.

    The stop is final: started again, the run does not train until ``max_steps`` is raised or
    ``train(continue_stopped=True)`` is called; the count then starts again. NaN does not count as an improvement.

    Args:
        metric: name of an evaluation metric, with or without ``eval_``; the first evaluation raises UnknownName if no
            set has it.
        patience: number of consecutive evaluations without an improvement that stops training.
        min_delta: an improvement must exceed this, in the metric's unit.
        mode: ``"min"`` for a metric that should fall, ``"max"`` for one that should rise.
        name: the key of its state in checkpoints; None: the class's name.
    """

    needs_evaluations = True
    state_schema = EarlyStoppingState

    def __init__(
        self,
        metric: str = "eval_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        *,
        name: str | None = None,
    ) -> None:
        self.name = name
        metric = text("EarlyStopping", "metric", metric)
        self._metric = metric if metric.startswith("eval_") else f"eval_{metric}"
        self._patience = whole("EarlyStopping", "patience", patience)
        self._min_delta = number("EarlyStopping", "min_delta", min_delta, least=0)
        self._sign = -1.0 if one_of("EarlyStopping", "mode", mode, ["min", "max"]) == "max" else 1.0
        self._best: float | None = None
        self._best_step = 0
        self._bad = 0
        self._seen: dict[str, Any] = {}  # metrics by evaluation set, until one has the metric

    def on_evaluate(self, ctx: contexts.EvaluateContext) -> None:
        if self._metric not in ctx.metrics:
            if ctx.name in self._seen:  # every set has been evaluated, and none has the metric
                known = {metric for metrics in self._seen.values() for metric in metrics}
                raise UnknownName("EarlyStopping: metric", self._metric, sorted(known))
            self._seen[ctx.name] = list(ctx.metrics)
            return
        self._seen = {}
        value, step = float(ctx.metrics[self._metric]), ctx.state.global_step
        if not math.isnan(value) and (self._best is None or self._sign * (self._best - value) > self._min_delta):
            self._best, self._best_step, self._bad = value, step, 0
            return
        self._bad += 1
        if self._bad >= self._patience:
            bad, self._bad = self._bad, 0
            best = "never was a number" if self._best is None else f"was best at step {self._best_step}: {self._best:g}"
            ctx.control.stop(f"{self._metric} {best}; no better in {bad} evaluations, now {value:g}", final=True)

    def state_dict(self) -> EarlyStoppingState:
        return {"best": self._best, "best_step": self._best_step, "bad": self._bad}

    def load_state_dict(self, state: Any) -> None:
        self._best, self._best_step, self._bad = state["best"], state["best_step"], state["bad"]


class OptunaPruning(Callback):
    """Reports a metric of each evaluation to an Optuna trial, and stops training when the trial is pruned::

        def objective(trial):
            rate = trial.suggest_float("lr", 1e-5, 1e-2, log=True)
            args = ds.TrainingArguments(f"runs/study/{trial.number}", learning_rate=rate)
            pruning = OptunaPruning(trial)
            result = ds.Trainer(model, args, eval_dataset=valid, callbacks=[pruning], ...).train()
            pruning.raise_if_pruned(result)
            return result.best_metric

        resume_killed_trials(study, objective)     # trials whose process was killed, from their checkpoints
        study.optimize(objective, n_trials=100)

    The study needs a storage on disk, and each trial an ``output_dir`` of its own, named after ``trial.number``.

    Args:
        trial: on ranks other than 0, None.
        metric: name of an evaluation metric, with or without ``eval_``.
        name: the key in messages; None: the class's name.
    """

    ranks = "zero"
    needs_evaluations = True

    def __init__(self, trial: Any, metric: str = "eval_loss", *, name: str | None = None) -> None:
        self.name = name
        require_extra("optuna", "optuna", "OptunaPruning")
        metric = text("OptunaPruning", "metric", metric)
        self._metric = metric if metric.startswith("eval_") else f"eval_{metric}"
        self._trial = trial

    def on_evaluate(self, ctx: contexts.EvaluateContext) -> None:
        if self._trial is None or self._metric not in ctx.metrics:
            return
        value, step = float(ctx.metrics[self._metric]), ctx.state.global_step
        reported = self._trial.study.get_trials(deepcopy=False)[self._trial.number].intermediate_values
        if step not in reported:  # by this trial before it was killed
            self._trial.report(value, step)
        if math.isnan(value) or self._trial.should_prune():
            ctx.control.stop(f"trial {self._trial.number} is pruned: {self._metric} {value:g}", final=True)

    def raise_if_pruned(self, result: Any) -> None:
        """Raises optuna.TrialPruned if this callback has stopped the run, in this leg or an earlier one.

        ``result`` is what ``train()`` returned.
        """
        import optuna

        if result.stopped_by == self.key:
            raise optuna.TrialPruned(result.why)


def resume_killed_trials(study: Any, objective: Callable[[Any], float], catch: tuple[type[Exception], ...] = ()) -> int:
    """Finish the trials that the study's storage lists as running: their process was killed.

    The objective gets the same trial, with the parameters that it had; so it uses the same ``output_dir``, and training
    resumes there. A trial that another process is still training is left alone: its ``output_dir`` is locked.

    Args:
        study: with a storage on disk.
        objective: as for ``study.optimize``.
        catch: exceptions with which a trial fails; others end the call.

    Returns:
        Number of trials that were resumed.
    """
    import optuna

    resumed = 0
    for killed in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        trial = optuna.trial.Trial(study, killed._trial_id)
        try:
            study.tell(trial, objective(trial))
        except Locked:
            continue
        except optuna.TrialPruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        except catch:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        resumed += 1
    return resumed
