"""SQLite databases of trackers: MLflow's and Trackio's. They are opened read-only, also while a run writes to them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from dalsegno.errors import ConfigurationError
from dalsegno.logs.values import Record, from_json

from .naming import kind_of
from .source import Skipped, Source
from .wandb_run import without_old_timelines

SQLITE = b"SQLite format 3\x00"

_MLFLOW_POINTS = """
    SELECT metrics.timestamp, metrics.step, metrics.key, CASE metrics.is_nan WHEN 1 THEN NULL ELSE metrics.value END
    FROM metrics WHERE metrics.run_uuid = ? ORDER BY metrics.timestamp, metrics.step, metrics.rowid
"""
_MLFLOW_RUNS = "SELECT run_uuid FROM runs WHERE lifecycle_stage = 'active' ORDER BY start_time"
_TRACKIO_RUNS = "SELECT run_id FROM metrics GROUP BY run_id ORDER BY min(id)"
_TRACKIO_ROWS = "SELECT timestamp, step, metrics FROM metrics WHERE run_id = ? ORDER BY id"


class Database(Source):
    """The newest run in a database of MLflow's or Trackio's.

    Raises:
        ConfigurationError: on reading, if the database is of another program.
    """

    program = "MLflow or Trackio"

    def records(self, skipped: Skipped) -> Iterator[Record]:
        uri = f"{self.path.absolute().as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(uri, uri=True)) as connection:
                yield from without_old_timelines(self._records(connection, skipped), skipped)
        except sqlite3.DatabaseError as error:
            raise ConfigurationError(f"{self.path}: cannot be read: {error}") from error

    def _records(self, connection: sqlite3.Connection, skipped: Skipped) -> Iterator[Record]:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if {"runs", "metrics", "experiments"} <= tables:
            runs, read = _MLFLOW_RUNS, _of_mlflow
        elif {"metrics", "configs"} <= tables:
            runs, read = _TRACKIO_RUNS, _of_trackio
        else:
            raise ConfigurationError(f"{self.path}: neither an MLflow nor a Trackio database")
        found = [run for (run,) in connection.execute(runs)]
        if len(found) > 1:
            skipped.note(f"{len(found) - 1} older runs in the same database", len(found) - 1)
        if found:
            yield from read(connection, found[-1])


def _of_mlflow(connection: sqlite3.Connection, run: str) -> Iterator[Record]:
    points = connection.execute(_MLFLOW_POINTS, (run,))
    return records_of_points((time / 1000, step, name, value) for time, step, name, value in points)


def _of_trackio(connection: sqlite3.Connection, run: str) -> Iterator[Record]:
    for time, step, text in connection.execute(_TRACKIO_ROWS, (run,)):
        values = from_json(json.loads(text))
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        step = int(numbers.pop("train/global_step", step))  # of transformers' callback, whose own step counts rows
        if numbers:  # else a text or a model card
            yield record_of(datetime.fromisoformat(time).timestamp(), step, numbers)


def records_of_points(points: Iterator[tuple[float, int, str, Any]]) -> Iterator[Record]:
    """Join points (seconds, step, name, value) that follow each other, of one time and step, to a record."""
    for (time, step), group in groupby(points, key=lambda point: point[:2]):
        yield record_of(time, step, {name: float("nan") if value is None else value for _, _, name, value in group})


def record_of(time: float, step: int, values: dict[str, Any]) -> Record:
    """Return a record with dalsegno's names; those of transformers' callbacks, ``train/loss``, lose their prefix."""
    plain = {name.removeprefix("train/").replace("eval/", "eval_", 1): value for name, value in values.items()}
    record = {"timestamp": time, "global_step": step, **plain}
    return {**record, "kind": kind_of(record)}


class MLflowFiles(Source):
    """A run's directory in MLflow's file store: ``metrics/<name>``, a line ``time value step`` for each point."""

    program = "MLflow"

    def records(self, skipped: Skipped) -> Iterator[Record]:
        points = [point for path in self.files() for point in self._points(path, skipped)]
        points.sort(key=lambda point: point[:2])
        return without_old_timelines(records_of_points(iter(points)), skipped)

    def _points(self, path: Path, skipped: Skipped) -> Iterator[tuple[float, int, str, Any]]:
        name = path.relative_to(self.path / "metrics").as_posix()
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            fields = line.split()
            try:
                yield int(fields[0]) / 1000, int(fields[2]), name, float(fields[1])
            except (ValueError, IndexError):
                skipped.note(f"metrics/{name}, line {number}: not a point")

    def files(self) -> list[Path]:
        return sorted(path for path in (self.path / "metrics").rglob("*") if path.is_file())


def is_mlflow_run(folder: Path) -> bool:
    return (folder / "meta.yaml").is_file() and (folder / "metrics").is_dir()
