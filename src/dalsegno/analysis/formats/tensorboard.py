"""Scalars of TensorBoard event files. The framing is parsed here, the events by tensorboard's own classes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from dalsegno.logs.values import Record
from dalsegno.system.imports import require_extra

from .source import Skipped, Source

_LENGTH = struct.Struct("<QI")  # length of the event in bytes, checksum of the length
_CHECKSUM = 4
FIRST = 5  # leading events of a file that are searched for the step from which it replaces older files
_LONGEST = 1 << 30  # bytes; a larger length means a damaged file

_PREFIXES = {"train": "", "eval": "eval_"}
"""Tags of Hugging Face and dalsegno: ``train/loss`` is ``loss``, ``eval/loss`` is ``eval_loss``."""

_TAGS = {
    "train-loss": "loss",
    "learning-rate": "learning_rate",
    "grad-norm": "grad_norm",
    "eval-loss": "eval_loss",
    "eval-perplexity": "eval_perplexity",
}
"""Tags of the curves that TBLogger writes by default, and the names in the records that they were drawn from."""


class EventFiles(Source):
    """All event files of one directory, the oldest first.

    Consecutive scalars of the same step are one record. A file whose first events announce a restart at some step
    replaces the older files from that step on.
    """

    program = "TensorBoard"

    def read(self, skipped: Skipped) -> Iterator[tuple[int, Record]]:
        require_extra(None, "tensorboard", "reading event files")
        files = self.files()
        restarts = [_restart_step(path) for path in files]
        for number, path in enumerate(files):
            end = min((step for step in restarts[number + 1 :] if step is not None), default=None)
            replaced = 0
            for place, record in enumerate(_records(path, skipped), start=1):
                if end is not None and record["global_step"] >= end:
                    replaced += 1
                else:
                    yield place, record
            if replaced:
                skipped.note(f"{path.name}: {replaced} records from step {end} on, replaced by a restart", replaced)

    def files(self) -> list[Path]:
        return event_files(self.path)


def event_files(path: Path) -> list[Path]:
    """The event files in a directory, in the order in which they were opened; ``path`` itself if it is a file."""
    return [path] if path.is_file() else sorted(path.glob("*tfevents*"), key=_opened)


def _opened(path: Path) -> list[tuple[int, str]]:
    """Sorts by the numbers in a name: time, host, process, and a count that tells the files of one second apart."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in path.name.split(".")]


def _records(path: Path, skipped: Skipped) -> Iterator[Record]:
    record: Record = {}
    group: str | None = None
    for event in _events(path, skipped):
        for value in event.summary.value:
            number = _scalar(value)
            if number is None:
                continue
            name, of_group = _name_of(value.tag)
            apart = group is not None and of_group is not None and of_group != group
            if record and (apart or name in record or event.step != record["global_step"]):
                yield record
                record, group = {}, None
            record = record or ({"timestamp": event.wall_time} if event.wall_time else {}) | {"global_step": event.step}
            record[name] = number
            group = of_group if group is None else group
    if record:
        yield record


def _name_of(tag: str) -> tuple[str, str | None]:
    """The metric's name, and the group that separates records of different kinds (None for the epoch, in all kinds)."""
    tag = _TAGS.get(tag, tag)
    group, slash, name = tag.partition("/")
    if not slash or group not in _PREFIXES:
        group, name = "", tag
    return (name, None) if name == "epoch" else (_PREFIXES.get(group, "") + name, group)


def _scalar(value: Any) -> float | None:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if value.HasField("tensor") and value.metadata.plugin_data.plugin_name in ("scalars", ""):
        tensor = value.tensor
        if len(tensor.float_val) == 1:
            return float(tensor.float_val[0])
        if tensor.dtype == 1 and len(tensor.tensor_content) == 4:  # DT_FLOAT
            return float(struct.unpack("<f", tensor.tensor_content)[0])
    return None


def _restart_step(path: Path) -> int | None:
    """The step from which this file replaces older ones; None if it does not."""
    from tensorboard.compat.proto.event_pb2 import SessionLog

    first = islice(_events(path, Skipped()), FIRST)
    return next((int(event.step) for event in first if event.session_log.status == SessionLog.START), None)


def _events(path: Path, skipped: Skipped) -> Iterator[Any]:
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    with path.open("rb") as file:
        while head := file.read(_LENGTH.size):
            place = file.tell() - len(head)
            length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else _LONGEST
            body = file.read(length + _CHECKSUM) if length < _LONGEST else b""
            if len(body) < length + _CHECKSUM:
                skipped.note(f"{path.name}: torn at byte {place}")
                return
            try:
                yield Event.FromString(body[:length])
            except DecodeError as error:
                skipped.note(f"{path.name}: event at byte {place}: {error}")
