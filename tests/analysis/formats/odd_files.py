"""Logs with values that no training writes, in every format that is read: 20 good records, odd ones among them.

Each odd value is put where a program would write the step, the loss, the time, the epoch, the kind or a name.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

GOOD = 20
NOW = 1_790_000_000.0

NUMBERS = (
    *("NaN", "Infinity", "-Infinity", "1e400", "-1", "-7", "1.5", "5e-324", "1e308", "-1e308", "0", "-0.0"),
    *(str(2**62), str(2**63), str(-(2**63)), "1" + "0" * 400, "1e17", "-1e17", "253402300800"),
)
OTHERS = (
    *("null", "true", '"7"', '""', '"NaN"', '"9999-12-31T23:59:59+00:00"', '"0001-01-01"', "[1]", "[[], {}]"),
    *('{"a": 1}', '"\\ud800"', '"\\u0000"', "[" * 300 + "]" * 300),
    *('{"a":' * 700 + "1" + "}" * 700, "9" * 5000, "[" * 5000 + "]" * 5000),  # here the array's reader gives up
)
"""JSON texts."""

FIELDS = ("step", "loss", "time", "epoch", "kind", "extra")


def odd_files(folder: Path) -> Iterator[Path]:
    """Write the files; yields each."""
    for name, (file, write, values) in FORMATS.items():
        path = folder / name / file
        path.parent.mkdir()
        write(path, list(_records(values)))
        yield path


Row = dict[str, str]
"""Field → JSON text."""


def _records(odd: Sequence[str]) -> Iterator[Row]:
    for step in range(1, GOOD + 1):
        good = {"step": str(step), "loss": str(1 / step), "time": str(NOW + step), "epoch": str(step / GOOD)}
        yield good
        if step == GOOD // 2:
            yield from ({**good, field: value} for value in odd for field in FIELDS)


def _text(row: Row, names: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{names.get(field, field)}": {text}' for field, text in row.items()) + "}"


OURS = {"step": "global_step", "time": "timestamp"}


def _json_lines(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(_text(row, OURS) + "\n" for row in rows))


def _json_array(path: Path, rows: list[Row]) -> None:
    path.write_text("[" + ", ".join(_text(row, {"time": "_timestamp"}) for row in rows) + "]")


def _trainer_state(path: Path, rows: list[Row]) -> None:
    history = ", ".join(_text(row, {}) for row in rows)
    path.write_text(f'{{"max_steps": {GOOD}, "log_history": [{history}]}}')


def _csv(path: Path, rows: list[Row]) -> None:
    lines = [[*FIELDS], *([row.get(field, "").replace("\n", "") for field in FIELDS] for row in rows)]
    path.write_text("".join(",".join('"' + cell.replace('"', '""') + '"' for cell in line) + "\n" for line in lines))


def _varint(number: int) -> bytes:
    low, number = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(number) if number else bytes([low])


def field_of(number: int, content: bytes | int) -> bytes:
    """A field of a protobuf message."""
    if isinstance(content, int):
        return _varint(number << 3) + _varint(content)
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def write_wandb(path: Path, messages: Sequence[bytes]) -> None:
    """W&B's file: LevelDB's log format."""
    file = bytearray(b":W&B\xe1\xbe\x00")
    for message in messages:
        part, rest = 1, message
        while True:
            left = 32768 - len(file) % 32768
            if left < 7:
                file += bytes(left)
                continue
            piece, rest = rest[: left - 7], rest[left - 7 :]
            part = {(True, False): 1, (True, True): 2, (False, True): 3, (False, False): 4}[part in (1,), bool(rest)]
            file += struct.pack("<IHB", 0, len(piece), part) + piece
            part = 3
            if not rest:
                break
    path.write_bytes(file)


def history(items: dict[str, str | bytes], step: bytes | int | None = None) -> bytes:
    """A record of W&B's file: a row of the history."""
    row = b"" if step is None else field_of(2, field_of(1, step))
    for name, text in items.items():
        value = text if isinstance(text, bytes) else text.encode()
        row += field_of(1, field_of(1, name.encode()) + field_of(16, value))
    return field_of(2, row)


def _wandb(path: Path, rows: list[Row]) -> None:
    names = {"step": "global_step", "loss": "train/loss", "time": "_timestamp", "epoch": "epoch"}
    write_wandb(path, [history({names.get(field, field): text for field, text in row.items()}) for row in rows])


def write_events(path: Path, events: Sequence[Any]) -> None:
    bodies = [event if isinstance(event, bytes) else event.SerializeToString() for event in events]
    path.write_bytes(b"".join(struct.pack("<QI", len(body), 0) + body + bytes(4) for body in bodies))


def _number(text: str) -> float | None:
    try:
        return float(json.loads(text))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


def _events(path: Path, rows: list[Row]) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    def event(row: Row) -> Any:
        number = {field: _number(text) for field, text in row.items()}
        step = number["step"]
        whole = 0 if step is None or step != step else int(max(-(2.0**63), min(step, 2.0**63 - 1024)))
        values = [
            Summary.Value(tag=tag, simple_value=number[field])
            for tag, field in (("train/loss", "loss"), ("train/epoch", "epoch"), ("extra", "extra"))
            if number.get(field) is not None
        ]
        return Event(step=whole, wall_time=number["time"] or 0.0, summary=Summary(value=values))

    write_events(path, [event(row) for row in rows])


def _cell(text: str) -> Any:
    """The value as SQLite stores it; invalid UTF-8 and bytes for lists."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, (list, dict)):
        return b"\xff\xfe"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return float(text) if len(text) < 300 else text
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value


def _mlflow(path: Path, rows: list[Row]) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "CREATE TABLE experiments (name); CREATE TABLE runs (run_uuid, lifecycle_stage, start_time);"
            "CREATE TABLE metrics (key, value, timestamp, run_uuid, step, is_nan);"
            "INSERT INTO runs VALUES ('r', 'active', 1)"
        )
        for row in rows:
            values = {field: _cell(text) for field, text in row.items()}
            key = values.get("kind", "loss")
            time = values["time"] * 1000 if isinstance(values["time"], float) else values["time"]
            cells = (key, values["loss"], time, values["step"])
            connection.execute("INSERT INTO metrics VALUES (CAST(? AS TEXT), ?, ?, 'r', ?, 0)", cells)
            if isinstance(values["epoch"], bytes):
                connection.execute(
                    "UPDATE metrics SET step = CAST(? AS TEXT) WHERE rowid = last_insert_rowid()", (values["epoch"],)
                )
        connection.commit()


def _mlflow_files(path: Path, rows: list[Row]) -> None:
    path.write_text("")
    (path.parent / "metrics").mkdir()
    lines = "".join(f"{row['time'].partition('.')[0]}000 {row['loss']} {row['step']}\n" for row in rows)
    (path.parent / "metrics" / "loss").write_bytes(lines.encode() + b"\xff\xfe 1 1\n")
    (path.parent / "metrics" / "\udcff").write_bytes(lines.encode())


Writer = Callable[[Path, list[Row]], None]

FORMATS: dict[str, tuple[str, Writer, Sequence[str]]] = {
    "lines": ("train.jsonl", _json_lines, (*NUMBERS, *OTHERS)),
    "array": ("log.json", _json_array, (*NUMBERS, *OTHERS)),
    "hf": ("trainer_state.json", _trainer_state, (*NUMBERS, *OTHERS)),
    "csv": ("metrics.csv", _csv, (*NUMBERS, *OTHERS, "x" * 140_000)),
    "wandb": ("run-1.wandb", _wandb, (*NUMBERS, *OTHERS)),
    "events": ("events.out.tfevents.1.host", _events, NUMBERS),
    "mlflow": ("mlflow.db", _mlflow, (*NUMBERS, *OTHERS)),
    "mlflow-files": ("meta.yaml", _mlflow_files, NUMBERS),
}
"""Name → (file, its writer, odd values that it can hold)."""
