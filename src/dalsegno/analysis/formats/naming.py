"""What other programs call step, time, epoch and kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dalsegno.logs.values import Record

STEPS = ("global_step", "step", "_step", "iteration", "iter", "train_step", "global_steps", "num_updates", "update")
TIMES = ("timestamp", "_timestamp", "wall_time", "time")
EPOCHS = ("epoch", "epochs")

BOOKKEEPING = ("timestamp", "kind", "global_step", "epoch")
"""What every record has beside its metrics."""

EVALUATIONS = ("eval", "val", "valid", "validation", "test", "dev")


@dataclass(frozen=True, slots=True)
class Naming:
    """How one log says what is said in every record; None: not at all."""

    step: str
    time: str | None
    epoch: str | None

    @classmethod
    def of(cls, record: Mapping[str, Any], step_key: str | None = None) -> Naming | None:
        """The names in a record of the log; None if it has no step."""
        step = step_key or _first(STEPS, record)
        if step is None or not _is_number(record.get(step)):
            return None
        return cls(step, _first(TIMES, record), _first(EPOCHS, record))

    @property
    def is_own(self) -> bool:
        """Whether there is nothing to rename."""
        return (self.step, self.time, self.epoch) in {("global_step", time, "epoch") for time in ("timestamp", None)}

    def renames(self) -> dict[str, str]:
        pairs = {self.step: "global_step", self.time: "timestamp", self.epoch: "epoch"}
        return {name: ours for name, ours in pairs.items() if name is not None and name != ours}


def _first(names: tuple[str, ...], record: Mapping[str, Any]) -> str | None:
    return next((name for name in names if _is_number(record.get(name))), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def kind_of(record: Record) -> str:
    """``train``, ``eval`` or ``final``, for a record that does not say: by the names of its metrics."""
    if "train_runtime" in record:
        return "final"
    metrics = [name for name in record if name not in BOOKKEEPING]
    return "eval" if metrics and all(map(is_of_evaluation, metrics)) else "train"


def is_of_evaluation(name: str) -> bool:
    """``eval_loss``, ``val/accuracy``, ``test-loss`` …"""
    word = name.replace("/", "_").replace("-", "_").replace(".", "_").partition("_")[0]
    return word.lower() in EVALUATIONS
