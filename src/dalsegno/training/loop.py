"""The training loop: all of it.

::

    for each step that is left to do, epoch by epoch:      Run.draws
        accumulate, clip, step, schedule                   Update
        log, evaluate, save, stop: whatever is due         Run.step_end
"""

from __future__ import annotations

from .result import TrainResult
from .session import Run
from .step import TrainStep


def train(run: Run, update: TrainStep) -> TrainResult:
    """Bring the run to its end, from where it is."""
    with run:
        for draw in run.steps():
            updated = update(draw)
            run.step_end(updated.loss, grad_norm=updated.grad_norm, lr=updated.lr)
    assert run.result is not None, "leaving the run gives it its result"
    return run.result
