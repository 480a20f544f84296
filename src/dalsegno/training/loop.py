"""The training loop: all of it.

::

    for each timeline: one more after each rollback        Session.timelines
        for each remaining step, epoch by epoch
            accumulate, clip, update, schedule             TrainStep
            log, evaluate, save, stop: whatever is due     Session.step_end
"""

from __future__ import annotations

from .result import TrainResult
from .session import Session
from .train_step import TrainStep


def train(session: Session, train_step: TrainStep) -> TrainResult:
    """Train from the present state to the end of the session."""
    with session:
        for steps in session.timelines():
            train_step.restart()
            for step_batch in steps:
                done = train_step(step_batch)
                session.step_end(done.loss, grad_norm=done.grad_norm, lr=done.lr)
    assert session.result is not None, "a session that was left has a result"
    return session.result
