"""OptunaPruning: reports evaluations to an Optuna trial, stops a trial that is pruned, and resumes killed trials."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dalsegno.callbacks.argument_checks import text
from dalsegno.errors import Locked
from dalsegno.events import Callback, contexts
from dalsegno.system.imports import require_extra


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
