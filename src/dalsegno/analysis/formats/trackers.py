"""Runs that trackers have written to disk: W&B's files, MLflow's databases and files, and Lightning's ``metrics.csv``.

W&B's file ``run-<id>.wandb`` is LevelDB's log format
(https://github.com/google/leveldb/blob/main/doc/log_format.md) after a header of seven bytes; its records are protobuf
messages, wandb/proto/wandb_internal.proto. Only the history is read, by the numbers of its fields, so that no wandb has
to be installed. The databases are opened read-only, also while a run writes to them.
"""

from __future__ import annotations

import csv
import json
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from heapq import heappop, heappush
from itertools import count, groupby
from pathlib import Path
from typing import Any

from dalsegno.analysis.formats.source import OURS, Naming, Skipped, Source, is_of_evaluation, no_step
from dalsegno.errors import ConfigurationError
from dalsegno.logs.values import Record, from_json, is_number

WANDB_HEADER = b":W&B"
_HEADER_BYTES = 7
_BLOCK = 32768
_CHUNK = struct.Struct("<IHB")  # checksum, length in bytes, part of a record
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_RECORD_HISTORY, _HISTORY_ITEM, _HISTORY_STEP = 2, 1, 2
_ITEM_KEY, _ITEM_NESTED_KEY, _ITEM_JSON = 1, 2, 16

TIMELINE = "dalsegno/timeline"
"""Series that dalsegno's trackers write: a new number marks the step to which the run has returned."""


class TrackedRun(Source):
    """A run of which dalsegno's trackers may have written several timelines."""

    def records(self, skipped: Skipped, kind: str | None = None) -> Iterator[Record]:
        return without_old_timelines(super().records(skipped), skipped)


class WandbRun(TrackedRun):
    """All files of one W&B run beside each other, one per process, in the order of their directories' names."""

    program = "W&B"

    def read(self, skipped: Skipped) -> Iterator[tuple[int, Record]]:
        rows = enumerate((row for path in self.files() for row in wandb_rows(path, skipped)), start=1)
        return ((number, record) for number, row in rows for record in _records_of_row(row))

    def files(self) -> list[Path]:
        return wandb_files(self.path.parent.parent, self.path.name) or [self.path]


def wandb_files(folder: Path, name: str = "run-*.wandb") -> list[Path]:
    """Return the files of runs in W&B's directory ``wandb``."""
    return sorted(path for path in folder.glob(f"*run-*/{name}") if not path.parent.is_symlink())


def wandb_rows(path: Path, skipped: Skipped) -> Iterator[dict[str, Any]]:
    """Yield the rows of the history: names to JSON values, with ``_step``."""
    for message in _messages(path, skipped):
        try:
            for number, value in _fields(message):
                if number == _RECORD_HISTORY:
                    yield _row(value)
        except (ValueError, IndexError, TypeError, AttributeError, RecursionError, struct.error) as error:
            skipped.note(f"{path.name}: a record is damaged: {error}")


def without_old_timelines(records: Iterator[Record], skipped: Skipped) -> Iterator[Record]:
    """Yield the records without those that a return of the run has replaced."""
    kept: dict[int, Record] = {}
    furthest: list[tuple[float, int]] = []  # a heap, so that each record is looked at once, however many timelines
    for number, record in enumerate(records):
        step = record["global_step"]
        if TIMELINE in record:
            before = len(kept)
            while furthest and -furthest[0][0] > step:
                del kept[heappop(furthest)[1]]
            if replaced := before - len(kept):
                skipped.note(f"{replaced} records after step {step}, to which the run has returned", replaced)
            if len(record.keys() - {"timestamp", "global_step", "kind", TIMELINE}) == 0:
                continue
        kept[number] = record
        heappush(furthest, (-step, number))
    yield from kept.values()


def _records_of_row(row: dict[str, Any]) -> Iterator[Record]:
    numbers = {key: value for key, value in row.items() if not key.startswith("_") and isinstance(value, (int, float))}
    values = _plain_names(numbers)
    place: Record = {"timestamp": row["_timestamp"]} if "_timestamp" in row else {}
    place["global_step"] = values.pop("global_step", row.get("_step", 0))
    return _by_kind(place, values)


def _by_kind(place: Record, values: Record) -> Iterator[Record]:
    """Yield what trackers have joined as a record each: training, evaluation, the end. Each has the epoch."""
    shared = {name: values[name] for name in ("epoch",) if name in values}
    parts: dict[str, Record] = {"train": {}, "eval": {}, "final": {}}
    at_end = "train_runtime" in values
    for name, value in values.items():
        final = at_end and ("loss" not in values or name.startswith(_OF_THE_END))
        if name not in shared:
            parts["eval" if is_of_evaluation(name) else "final" if final else "train"][name] = value
    yield from ({**place, **shared, **part} for part in parts.values() if part)


_OF_THE_END = ("train_", "total_flos")  # names in the final record of dalsegno and Hugging Face


def _row(history: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for number, value in _fields(history):
        if number == _HISTORY_STEP:
            row.setdefault("_step", dict(_fields(value)).get(1, 0))
        elif number == _HISTORY_ITEM:
            parts = [*_fields(value)]
            keys = [text.decode() for part, text in parts if part in (_ITEM_KEY, _ITEM_NESTED_KEY)]
            row[".".join(keys)] = from_json(json.loads(dict(parts).get(_ITEM_JSON, "null")))
    return row


def _messages(path: Path, skipped: Skipped) -> Iterator[bytes]:
    """Yield the records of the log; stop at the first that is torn."""
    parts: list[bytes] = []
    data = path.read_bytes()
    if data[: len(WANDB_HEADER)] != WANDB_HEADER:
        skipped.note(f"{path.name}: does not begin with W&B's header")
        return
    place = _HEADER_BYTES
    while place < len(data):
        left = _BLOCK - place % _BLOCK
        if left < _CHUNK.size:
            place += left
            continue
        if place + _CHUNK.size > len(data):
            skipped.note(f"{path.name}: torn at byte {place}")
            return
        _, length, part = _CHUNK.unpack_from(data, place)
        begin = place + _CHUNK.size
        if begin + length > len(data) or part not in (_FULL, _FIRST, _MIDDLE, _LAST):
            if any(data[place:]):
                skipped.note(f"{path.name}: torn at byte {place}")
            return
        parts = [] if part in (_FULL, _FIRST) else parts
        parts.append(data[begin : begin + length])
        if part in (_FULL, _LAST):
            yield b"".join(parts)
        place = begin + length


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a protobuf message: bytes, or a number."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, place = _varint(message, place)
            yield number, value
            continue
        if wire == 2:
            length, place = _varint(message, place)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if place + length > len(message):
            raise ValueError("a field is longer than its message")
        yield number, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if shift > 63:
            raise ValueError("an integer of more than 64 bits")
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if not byte & 0x80:
            return value, place


SQLITE = b"SQLite format 3\x00"

_POINTS = """
    SELECT metrics.timestamp, metrics.step, metrics.key, CASE metrics.is_nan WHEN 1 THEN NULL ELSE metrics.value END
    FROM metrics WHERE metrics.run_uuid = ? ORDER BY metrics.timestamp, metrics.step, metrics.rowid
"""
_RUNS = "SELECT run_uuid FROM runs WHERE lifecycle_stage = 'active' ORDER BY start_time"


class Database(TrackedRun):
    """The newest run in a database of MLflow's."""

    program = "MLflow"

    def read(self, skipped: Skipped) -> Iterator[tuple[int, Record]]:
        uri = f"{self.path.absolute().as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(uri, uri=True)) as connection:
                connection.text_factory = partial(str, encoding="utf-8", errors="replace")
                yield from enumerate(self._records(connection, skipped), start=1)
        except sqlite3.DatabaseError as error:
            raise ConfigurationError(f"{self.path}: cannot be read: {error}") from error

    def _records(self, connection: sqlite3.Connection, skipped: Skipped) -> Iterator[Record]:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not {"runs", "metrics", "experiments"} <= tables:
            raise ConfigurationError(f"{self.path}: not a database of MLflow's")
        found = [run for (run,) in connection.execute(_RUNS)]
        if len(found) > 1:
            skipped.note(f"{len(found) - 1} older runs in the same database", len(found) - 1)
        points = connection.execute(_POINTS, found[-1:]) if found else []
        yield from records_of_points(
            (time / 1000 if is_number(time) else time, step, str(name), value) for time, step, name, value in points
        )


def records_of_points(points: Iterator[tuple[Any, Any, str, Any]]) -> Iterator[Record]:
    """Join points (seconds, step, name, value) that follow each other, of one time and step, to a record of a kind."""
    for (time, step), group in groupby(points, key=lambda point: point[:2]):
        values = {name: float("nan") if value is None else value for _, _, name, value in group}
        yield from _by_kind({"timestamp": time, "global_step": step}, _plain_names(values))


def _plain_names(values: Mapping[str, Any]) -> Record:
    """The values under dalsegno's names: those of transformers' callbacks, ``train/loss``, lose their prefix."""
    return {name.removeprefix("train/").replace("eval/", "eval_", 1): value for name, value in values.items()}


class MLflowFiles(TrackedRun):
    """A run's directory in MLflow's file store: ``metrics/<name>``, a line ``time value step`` for each point."""

    program = "MLflow"

    def read(self, skipped: Skipped) -> Iterator[tuple[int, Record]]:
        points = [point for path in self.files() for point in self._points(path, skipped)]
        points.sort(key=lambda point: point[:2])
        return enumerate(records_of_points(iter(points)), start=1)

    def _points(self, path: Path, skipped: Skipped) -> Iterator[tuple[float, int, str, Any]]:
        name = path.relative_to(self.path / "metrics").as_posix()
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), start=1):
            fields = line.split()
            try:
                yield int(fields[0]) / 1000, int(fields[2]), name, float(fields[1])
            except (ValueError, IndexError, OverflowError):
                skipped.note(f"metrics/{name}, line {number}: not a point")

    def files(self) -> list[Path]:
        return sorted(path for path in (self.path / "metrics").rglob("*") if path.is_file())


def is_mlflow_run(folder: Path) -> bool:
    return (folder / "meta.yaml").is_file() and (folder / "metrics").is_dir()


# --- metrics.csv: one row per record, empty cells for missing metrics -----------------------------------------------


class MetricsCsv(Source):
    """Raises ConfigurationError on reading, if it has no column with the name of a step."""

    program = "Lightning"
    unit = "line"

    def read(self, skipped: Skipped) -> Iterator[tuple[int, Record]]:
        rows = self._rows(skipped)
        _, names = next(rows, (1, []))
        for number, row in rows:
            if len(row) == len(names):
                yield number, {name: _value(text) for name, text in zip(names, row, strict=True) if text}
            else:
                skipped.note(f"line {number}: {len(row)} fields under {len(names)} names")

    def naming(self) -> Naming:
        _, names = next(self._rows(Skipped()), (1, []))
        naming = Naming.of(dict.fromkeys(names, 0), self.step_key) if names else OURS
        if naming is None:
            raise ConfigurationError(no_step(self.path, names, self.step_key))
        return naming

    def _rows(self, skipped: Skipped) -> Iterator[tuple[int, list[str]]]:
        with self.path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            rows = csv.reader(_whole_lines(file, skipped))
            for number in count(1):
                try:
                    yield number, next(rows)
                except StopIteration:
                    return
                except csv.Error as error:
                    skipped.note(f"line {number}: {error}")


def _whole_lines(file: Iterable[str], skipped: Skipped) -> Iterator[str]:
    """Drop a last line without a line end: its last number may be incomplete."""
    for number, line in enumerate(file, start=1):
        if line.endswith("\n"):
            yield line
        else:
            skipped.note(f"line {number}: torn")


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
