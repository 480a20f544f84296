"""How a leg of a run came to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dalsegno.state import TrainerControl, TrainerState

Reason = Literal["finished", "stopped", "aborted", "exhausted", "interrupted", "exception"]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What ``train()`` returns."""

    global_step: int
    """Finished optimizer steps, over all legs."""
    reason: Reason
    """``finished`` (``max_steps`` or all epochs done), ``stopped`` or ``aborted`` (somebody asked for it), or
    ``exhausted`` (the data came to its end and cannot begin again)."""
    why: str | None = None
    """In words, where somebody asked for the end."""
    stopped_by: str | None = None
    """The key of the callback that asked, ``signal``, ``clock``, or ``the program``."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Of the final record."""
    checkpoint: Path | None = None
    """The newest one."""
    best_step: int | None = None
    """Of the best evaluation, by ``metric_for_best_model``; None if there was none."""
    best_metric: float | None = None
    """Its value there."""
    best_checkpoint: Path | None = None
    """The one of that step; None if none was saved then, or it has not been kept."""

    def with_best(self, state: TrainerState, path_of: Callable[[int], Path]) -> TrainResult:
        """The same, with the best evaluation that ``state`` knows of."""
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
    """The reason for the end, from what led to it."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if error is not None:
        return "exception"
    if control.should_abort_without_save:
        return "aborted"
    if control.should_training_stop:
        return "stopped"
    return "exhausted" if exhausted else "finished"
