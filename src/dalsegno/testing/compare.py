"""compare_runs: compare every tensor, every component's state and every log record of two runs.

Only wall-clock values may differ: ``timestamp``, ``tok_per_sec``, ``mfu``, ``peak_mem``, ``data_share``, ``*_runtime``,
``*_per_second``; the length of the logs in bytes, since logs contain these as text; and what a component declares in
``state_varies``: the training time, random ids.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from dalsegno.callbacks.trackers.tracker_logger import OUTBOXES
from dalsegno.checkpoint import Checkpoint, CheckpointManager, saved_states
from dalsegno.checkpoint.difference import Difference, tensor_differences, value_differences
from dalsegno.checkpoint.index import Index
from dalsegno.checkpoint.names import CHECKPOINTS
from dalsegno.control.inbox import INBOX
from dalsegno.errors import NotFound
from dalsegno.logs import EventPosition, Position, ReadReport, is_wall_clock, read_records
from dalsegno.logs.journal import JOURNAL
from dalsegno.logs.values import Record
from dalsegno.stateful.annotations import check_types
from dalsegno.witness import WITNESS

logger = logging.getLogger("dalsegno")

_TITLES = {
    "model": "weights",
    "optimizer": "optimizer",
    "scheduler.0": "learning rate",
    "scaler": "gradient scaler",
    "loader": "data position",
    "callbacks.DataOrder": "data order",
    "rng": "random generators",
    "trainer": "trainer",
    "meter": "sums between logs",
}
"""Titles of components, whose rows come first, in this order."""
_BYTES = {
    frozenset(Position.__dataclass_fields__): {*Position.__dataclass_fields__} - {"path"},
    frozenset(EventPosition.__dataclass_fields__): {"files", "log_dir"},
}
"""Fields of saved log positions that are not compared: byte counts, which depend on wall-clock values and legs, what
depends on the records of saves, and the place of the files."""
_SENT = Path("logs") / OUTBOXES  # what trackers get: in which order, with which times and repeats, depends on the legs


@dataclass(frozen=True, slots=True)
class Row:
    """The comparison of one component or log."""

    what: str
    """Key of the component, or name of the log."""
    count: int
    """Number of tensors, values or records."""
    unit: str
    difference: str | None = None
    """The first difference; None without any."""

    @property
    def identical(self) -> bool:
        return self.difference is None

    @property
    def title(self) -> str:
        """Readable form of ``what``."""
        if self.what in _TITLES:
            return _TITLES[self.what]
        return self.what.replace("callbacks.", "callback ").replace("logs/", "log ")


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The comparison of two runs."""

    rows: list[Row]

    @property
    def identical(self) -> bool:
        return all(row.identical for row in self.rows)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """A header and one line per row, as text."""
        lines = [("compared", "count", "", "result")]
        for row in self.rows:
            unit = row.unit if row.count != 1 else row.unit.removesuffix("s")
            lines.append((row.title, f"{row.count:,}", unit, row.difference or "identical"))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(f"{a:<{widths[0]}}  {b:>{widths[1]}} {c:<{widths[2]}}  {d}" for a, b, c, d in lines)


@check_types
def compare_runs(first: str | Path, second: str | Path, *, ignoring: Collection[str] = ()) -> RunComparison:
    """Compare the newest checkpoints and all logs of two runs.

    Args:
        first: output directory of a run.
        second: output directory of the other run.
        ignoring: values of components that may differ, such as ``"trainer.best_model_checkpoint"``.

    Raises:
        NotFound: if one of them has no checkpoint.
    """
    first, second = Path(first), Path(second)
    ours, theirs = _newest(first), _newest(second)
    steps = ours.manifest.step, theirs.manifest.step
    rows = [Row("step", 1, "values", None if steps[0] == steps[1] else f"{steps[0]} and {steps[1]}")]
    rows += sorted([*_tensors(ours, theirs), *_states(ours, theirs, ignoring)], key=_place)
    rows += _logs(first, second)
    return RunComparison(rows)


def _newest(output_dir: Path) -> Checkpoint:
    checkpoint = CheckpointManager(output_dir).find()
    if checkpoint is None:
        raise NotFound(f"{output_dir}: no checkpoint")
    return checkpoint


def _place(row: Row) -> tuple[int, str]:
    """Sort key of the rows of state; the sort is stable, so a component's tensors stay before its values."""
    titled = list(_TITLES)
    return (titled.index(row.what) if row.what in titled else len(titled), row.what)


def _tensors(ours: Checkpoint, theirs: Checkpoint) -> Iterator[Row]:
    one, other = (Index.of_checkpoint(each) for each in (ours, theirs))
    found: dict[str, str] = {}
    for each in tensor_differences(ours, theirs):
        found.setdefault(each.component, str(each))
    for component in sorted({*one.tensors, *other.tensors, *found}):
        count = len({*one.of(component), *other.of(component)})
        yield Row(component, count, "tensors", found.get(component))


def _states(ours: Checkpoint, theirs: Checkpoint, ignoring: Collection[str]) -> Iterator[Row]:
    mine, yours = saved_states(ours), saved_states(theirs)
    for key in sorted({*mine, *yours}):
        varies = {
            name for run in (ours, theirs) if (record := run.manifest.components.get(key)) for name in record.varies
        }
        varies |= {name.removeprefix(f"{key}.") for name in ignoring}
        here, there = ([_compared(state, varies) for state in saved.get(key, [])] for saved in (mine, yours))
        if size := max(_size(here), _size(there)):
            yield Row(key, size, "values", _first(value_differences(key, here, there)))


def _compared(state: Any, varies: Collection[str] = (), within: str = "") -> Any:
    """``state`` without these fields, and without wall-clock values; ``within``: the fields that lead to it."""
    if isinstance(state, (list, tuple)) and not isinstance(state, torch.Size):
        return type(state)(_compared(each, varies, within) for each in state)
    if not isinstance(state, dict):
        return state
    bytes_ = _BYTES.get(frozenset(state), set())
    kept = [name for name in state if name not in bytes_ and not is_wall_clock(str(name))]
    paths = {name: f"{within}{name}" for name in kept}
    return {name: _compared(state[name], varies, f"{path}.") for name, path in paths.items() if path not in varies}


def _first(differences: Iterator[Difference]) -> str | None:
    return next(map(str, differences), None)


def _records(path: Path) -> list[Record]:
    """Of a log, without those of saves, which each leg makes anew; a file of another kind, such as a model's
    ``config.json``, has none."""
    report = ReadReport()
    records = list(read_records(path, report)) if path.exists() else []
    if records and report.skipped:
        logger.warning("%s: skipped %s", path, "; ".join(report.skipped))
    return [record for record in records if record.get("kind") != "save"]


def _logs(ours: Path, theirs: Path) -> Iterator[Row]:
    for name in sorted(_log_names(ours) | _log_names(theirs)):
        records = [_records(folder / name) for folder in (ours, theirs)]
        pairs = enumerate(zip_longest(*records), start=1)
        differences = (_record_difference(a, b, f"{Path(name).name} record {number}") for number, (a, b) in pairs)
        yield Row(name, len(records[0]), "records", next(filter(None, differences), None))


def _log_names(output_dir: Path) -> set[str]:
    """Paths of all logs of a run, without those in ``rewound/`` and the witness, which is each leg's own."""
    names = {path.relative_to(output_dir) for path in output_dir.rglob("*.json*")} - {Path("run.json"), Path(JOURNAL)}
    others = (name for name in names if not name.is_relative_to(_SENT))
    return {name.as_posix() for name in others if not {"rewound", CHECKPOINTS, INBOX, WITNESS} & set(name.parts)}


def _record_difference(mine: Mapping[str, Any] | None, yours: Mapping[str, Any] | None, where: str) -> str | None:
    if mine is None or yours is None:
        return f"{where}: only in the {'second' if mine is None else 'first'}"
    return _first(value_differences(where, _compared(mine), _compared(yours)))


def _size(tree: Any) -> int:
    if isinstance(tree, Mapping):
        return sum(map(_size, tree.values()))
    return sum(map(_size, tree)) if isinstance(tree, (list, tuple)) else 1
