"""A study whose processes are killed. At the top of a module, so that ranks can import it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import optuna

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.callbacks.control.early_stopping import OptunaPruning, resume_killed_trials
from dalsegno.testing import tiny_regression_data
from support.small import small_trainer

RATES = [0.01, 0.02, 1e-6, 0.005]
"""The third learns nothing, and is pruned."""


class Kill(ds.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_done(self, ctx: ds.StepDoneContext) -> None:
        if ctx.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def study(folder: Path) -> optuna.Study:
    return optuna.create_study(
        storage=f"sqlite:///{folder}/study.db",
        study_name="tests",
        load_if_exists=True,
        sampler=optuna.samplers.GridSampler({"rate": RATES}, seed=0),
        pruner=optuna.pruners.ThresholdPruner(upper=12.6, n_warmup_steps=9),
    )


def run(folder: Path, kills: dict[int, int]) -> None:
    """Resume, then continue to four trials. ``kills``: by trial, the step after which the process ends."""

    def objective(trial: optuna.Trial) -> float:
        pruning = OptunaPruning(trial)
        rate = trial.suggest_categorical("rate", RATES)
        killers: list[Any] = [Kill(kills[trial.number])] if trial.number in kills else []
        result = small_trainer(
            folder / f"trial-{trial.number}",
            pruning,
            JsonLogger(),
            *killers,
            parts={"eval_dataset": tiny_regression_data(8, seed=1)},
            max_steps=12,
            logging_steps=1,
            eval_steps=2,
            save_steps=4,
            save_in_background=False,
            learning_rate=rate,
        ).train()
        pruning.raise_if_pruned(result)
        return float(result.best_metric or 0.0)

    own = study(folder)
    resume_killed_trials(own, objective)
    own.optimize(objective, n_trials=4 - len(own.trials))
