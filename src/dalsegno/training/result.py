"""TrainResult: how a leg of a run ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dalsegno.errors import LeaseLost
from dalsegno.state import TrainerControl, TrainerState
from dalsegno.system.exit_status import ExitStatus

Reason = Literal["finished", "stopped", "aborted", "exhausted", "interrupted", "exception", "taken_over"]


class Prediction(dict[str, float]):
    """Metrics, as returned by ``predict()``."""

    outputs: Any = None
    """With ``outputs=True``: what the model returned for each sample, without the loss, on the CPU. One set: a tensor,
    or a tree of tensors as the model returns them; several: by name."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Returned by ``train()``."""

    global_step: int
    """Finished optimizer steps, over all legs."""
    reason: Reason
    """``finished`` (``max_steps`` or all epochs done), ``stopped`` (on request), ``aborted`` (the same,
    without a checkpoint), or ``exhausted`` (the data ended and cannot be read again). In ``on_train_end`` also
    ``exception``, ``interrupted`` (Ctrl-C) or ``taken_over`` (:class:`~dalsegno.LeaseLost`)."""
    why: str | None = None
    """In words, if the end was requested or an exception caused it."""
    stopped_by: str | None = None
    """Who requested the end: a callback's key, ``signal``, ``clock``, ``on_resume`` or ``the program``."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Of the final record."""
    checkpoint: Path | None = None
    """The newest published one."""
    best_step: int | None = None
    """Of the best evaluation, by ``metric_for_best_model``; None if there was none."""
    best_metric: float | None = None
    """The metric's value at ``best_step``."""
    best_checkpoint: Path | None = None
    """Checkpoint of ``best_step``; None if none was saved there, or it was not kept."""
    diverged: bool = False
    """Whether a callback judged that training has diverged."""

    @property
    def exit_status(self) -> ExitStatus:
        """For ``sys.exit``: 0 done, 1 error, 3 diverged, 75 stopped in time (run the same program again)."""
        if self.diverged:
            return ExitStatus.DIVERGED
        if self.reason == "stopped" and self.stopped_by in ("signal", "clock"):
            return ExitStatus.RUN_AGAIN
        if self.stopped_by == "on_resume":
            return ExitStatus.ERROR
        statuses: dict[Reason, ExitStatus] = {
            "exception": ExitStatus.ERROR,
            "interrupted": ExitStatus.INTERRUPTED,
            "taken_over": ExitStatus.TAKEN_OVER,
        }
        return statuses.get(self.reason, ExitStatus.DONE)

    def with_best(self, state: TrainerState, path_of: Callable[[int], Path]) -> TrainResult:
        """A copy with the best evaluation recorded in ``state``."""
        if state.best_metric is None:
            return self
        path = path_of(state.best_global_step)
        return replace(
            self,
            best_step=state.best_global_step,
            best_metric=state.best_metric,
            best_checkpoint=path if path.is_dir() else None,
        )


def reason_of(error: BaseException | None, control: TrainerControl, exhausted: bool) -> Reason:
    """Reason for the end: ``error`` first, then a request, then the end of the data."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, LeaseLost):
        return "taken_over"
    if error is not None:
        return "exception"
    if control.should_abort_without_save:
        return "aborted"
    if control.should_training_stop:
        return "stopped"
    return "exhausted" if exhausted else "finished"
