"""A hook of KempnerForge, which cannot be installed: written after its documentation."""

from __future__ import annotations

import math
from functools import partial

import dalsegno as ds
from dalsegno.interop.kempner import TrainingHook
from interop.tried import Tried, trainer


class EarlyStoppingHook(TrainingHook):
    """Stops when the loss of evaluations has not improved for ``patience`` of them."""

    def __init__(self, patience: int = 3) -> None:
        self._patience = patience
        self._best = math.inf
        self._counter = 0

    def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
        if metrics["eval/loss"] < self._best:
            self._best, self._counter = metrics["eval/loss"], 0
            return
        self._counter += 1
        if self._counter >= self._patience:
            raise KeyboardInterrupt


def stopping() -> ds.Callback:
    return ds.adapt(EarlyStoppingHook(), state=("_best", "_counter"))


LEARNS_NOTHING = partial(trainer, learning_rate=0.0, eval_steps=2)
BY = "(kempnerforge)"

TRIED = (
    Tried("EarlyStoppingHook", BY, stopping, remark='with `state=("_best", "_counter")`', trainer=LEARNS_NOTHING),
    Tried(
        *("EarlyStoppingHook", BY, EarlyStoppingHook),
        differs="its counter begins anew, so that it stops later; a warning says so at the first save",
        what=("step",),
        trainer=LEARNS_NOTHING,
    ),
)
