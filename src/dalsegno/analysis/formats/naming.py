"""What other programs call step, time, epoch and kind."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dalsegno.analysis.blocks import KINDS, WHOLE, is_number
from dalsegno.logs.values import Record

STEPS = (
    *("global_step", "step", "_step", "iteration", "iter", "train_step", "trainer/global_step"),
    *("global_steps", "num_updates", "num_steps", "update", "steps", "batch"),
)
TIMES = ("timestamp", "_timestamp", "wall_time", "time", "datetime")
EPOCHS = ("epoch",)
LOSSES = (
    *("loss", "train_loss", "train/loss", "training_loss", "loss/train", "train/loss_step", "train_loss_step"),
    *("train_loss_epoch", "eval_loss", "val_loss", "val/loss"),
)
"""Under which names a loss is looked for, in this order."""

HEADER = "header"
"""The kind of a record that says what is true of the whole run."""

EVALUATIONS = ("eval", "val", "valid", "validation", "test", "dev")

BOOKKEEPING = ("timestamp", "kind", "global_step", "epoch")
"""What every record has beside its metrics."""

FIRST = 100
"""Records among which the first one must be that has a step."""

EARLY = 1e8
"""UTC seconds of 1973: a smaller ``time`` is no time of day, but how long something took."""


@dataclass(frozen=True, slots=True)
class Naming:
    """How one log says what every record says; None: not at all."""

    step: str
    time: str | None
    epoch: str | None

    @classmethod
    def of(cls, record: Mapping[str, Any], step_key: str | None = None) -> Naming | None:
        """The names in a record of the log; None if it has no step."""
        step = _first((step_key,) if step_key else STEPS, record)
        times = [name for name in TIMES if moment(record.get(name)) is not None]
        return cls(step, next(iter(times), None), _first(EPOCHS, record)) if step else None

    def renames(self) -> dict[str, str]:
        """From this log's names to ours, where they differ."""
        pairs = {self.step: "global_step", self.time: "timestamp", self.epoch: "epoch"}
        return {name: ours for name, ours in pairs.items() if name is not None and name != ours}

    def apply(self, record: Record) -> Record | None:
        """The record under our names, with its kind; None if it has no step, unless it is the header."""
        if record.get("kind") == HEADER:
            return record
        renames = self.renames()
        if renames:  # what already has the name is kept beside it: some count both "step" and "global_step"
            taken = {ours: f"{ours}_" for ours in renames.values()}
            record = {renames.get(name) or taken.get(name, name): value for name, value in record.items()}
        if not _is_step(record.get("global_step")):
            return None
        if isinstance(said := record.get("timestamp"), str) and (seconds := moment(said)) is not None:
            record = {**record, "timestamp": seconds}
        return record if record.get("kind") in KINDS else {**record, "kind": kind_of(record)}


def moment(value: Any) -> float | None:
    """A time of day in UTC seconds; None if it is none. Texts are read as ISO 8601, those without a zone as UTC."""
    if isinstance(value, str):
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            return None
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return value if is_number(value) and value > EARLY else None


def kind_of(record: Record) -> str:
    """``train``, ``eval`` or ``final``, for a record that does not say: by the names of its metrics."""
    if isinstance(kind := record.get("kind"), str):
        return kind
    if "train_runtime" in record:
        return "final"
    metrics = [name for name, value in record.items() if name not in BOOKKEEPING and value is not None]
    return "eval" if metrics and all(map(is_of_evaluation, metrics)) else "train"


def is_of_evaluation(name: str) -> bool:
    """``eval_loss``, ``val/accuracy``, ``test-loss`` …"""
    word = name.replace("/", "_").replace("-", "_").replace(".", "_").partition("_")[0]
    return word.lower() in EVALUATIONS


def loss_of(names: Container[str]) -> str | None:
    """The name of the loss among these; None if there is none that looks like it."""
    return next((name for name in LOSSES if name in names), None)


def _is_step(value: Any) -> bool:
    """Whether steps can be counted so: not by NaN, nor by more than an array of integers holds."""
    return is_number(value) and abs(value) < WHOLE


def _first(names: tuple[str, ...], record: Mapping[str, Any]) -> str | None:
    return next((name for name in names if is_number(record.get(name))), None)


def no_step(path: Path, names: Iterable[str], step_key: str | None) -> str:
    """What to say of a log whose records have these names."""
    wanted = f"no number under {step_key!r}" if step_key else "nothing that looks like a step"
    have = ", ".join(names) or "nothing"
    return f"{path}: {wanted} in its records, which have {have}; name the step with step_key= (--step-key)"
