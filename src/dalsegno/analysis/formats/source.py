"""Source: a log file of any format, and the names that programs use for step, time, epoch, kind and loss."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np

from dalsegno.analysis.blocks import KINDS, Block, Column, RecordBlock
from dalsegno.errors import ConfigurationError
from dalsegno.logs.reader import ReadReport, read_records, record_in
from dalsegno.logs.values import Record, is_number

STEPS = (
    *("global_step", "step", "_step", "iteration", "iter", "train_step", "trainer/global_step"),
    *("global_steps", "num_updates", "num_steps", "update", "steps", "batch"),
)
TIMES = ("timestamp", "_timestamp", "wall_time", "time", "datetime")
LOSSES = (
    *("loss", "train_loss", "train/loss", "training_loss", "loss/train", "train/loss_step", "train_loss_step"),
    *("train_loss_epoch", "eval_loss", "val_loss", "val/loss"),
)
"""Names of a loss, in the order of preference."""

HEADER = "header"  # kind of the record with the settings of the run

EVALUATIONS = ("eval", "val", "valid", "validation", "test", "dev")

SETTING = r"(^|[^a-z])(learning_rate|lr|weight_decay|momentum|betas?|eps|batch_size|loss_scale)([^a-z]|$)"
"""Names of what a program has set, unlike what it has measured; also read by the scripts of pages."""

BOOKKEEPING = ("timestamp", "kind", "global_step", "epoch")  # fields of a record that are not metrics

OF_ALL_KINDS = (*BOOKKEEPING, "num_input_tokens_seen", "train_runtime", "train_tokens_per_second")
"""Fields that tell no kind: with ``include_num_input_tokens_seen`` Hugging Face adds them to each record."""

FIRST = 100  # leading records among which one must have a step
EARLY = 1e8  # UTC seconds in 1973: a smaller ``time`` is a duration, not a timestamp

BOUNDS = {"timestamp": (0.0, 253402300800.0), "epoch": (-math.inf, math.inf)}
"""Between these such numbers are sound: a date has no year after 9999."""

DEEPEST = 32  # most levels of lists and dicts in a value: what prints or compares one goes down recursively
EXACT = 1 << 53  # steps of this magnitude and more are not exact as floats, which columns hold

BEYOND_FLOATS = 1 << 1023

NOT_FINITE = (b"NaN", b"Infinity")
"""In each line that has a number of the kind."""

_PLAIN = frozenset({float, int, bool, type(None)})

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Naming:
    """The names that one log uses; None for what it does not log."""

    step: str
    time: str | None
    epoch: str | None

    @classmethod
    def of(cls, record: Mapping[str, Any], step_key: str | None = None) -> Naming | None:
        """The naming of a record; None if it has no step."""
        steps = (name for name in ((step_key,) if step_key else STEPS) if is_number(record.get(name)))
        times = (name for name in TIMES if moment(record.get(name)) is not None)
        step = next(steps, None)
        return cls(step, next(times, None), "epoch" if is_number(record.get("epoch")) else None) if step else None

    def renames(self) -> dict[str, str]:
        """This log's names → dalsegno's, where they differ."""
        pairs = {self.step: "global_step", self.time: "timestamp", self.epoch: "epoch"}
        return {name: ours for name, ours in pairs.items() if name is not None and name != ours}


OURS = Naming("global_step", "timestamp", "epoch")


def moment(value: Any) -> float | None:
    """A timestamp in UTC seconds; None if it is not one. Strings are read as ISO 8601, by default in UTC."""
    if isinstance(value, str):
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            return None
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return value if is_number(value) and value > EARLY else None


def kind_of(record: Record) -> str:
    """The kind of a record; without one, ``train``, ``eval`` or ``final`` by the names of its metrics."""
    if isinstance(kind := record.get("kind"), str):
        return kind
    if record.get("train_runtime") is not None and record.get("loss") is None:
        return "final"
    metrics = (name for name, value in record.items() if name not in OF_ALL_KINDS and value is not None)
    return "eval" if is_of_evaluation(next(metrics, "")) and all(map(is_of_evaluation, metrics)) else "train"


@lru_cache(1 << 12)  # a log has few names, each of them in most records
def is_of_evaluation(name: str) -> bool:
    """``eval_loss``, ``val/accuracy``, ``test-loss`` …"""
    word = name.replace("/", "_").replace("-", "_").replace(".", "_").partition("_")[0]
    return word.lower() in EVALUATIONS


_TRACES = {
    "train": b"",  # also a record without a kind of its own
    "eval": b'"(?i:%s)[-_./"]' % "|".join(EVALUATIONS).encode(),
    "final": b'"(?:final|train_runtime)"',
}


def trace_of(kind: str) -> re.Pattern[bytes]:
    """What the JSON of each record of this kind contains unless it has a backslash; that of others may, too."""
    return re.compile(_TRACES.get(kind, b'"%s"' % re.escape(kind.encode())))


def is_setting(name: str) -> bool:
    """``learning_rate``, ``train/lr``, ``lr-AdamW``, ``weight_decay/0`` …"""
    return re.search(SETTING, name, re.IGNORECASE) is not None


def loss_of(names: Container[str]) -> str | None:
    """The preferred name of a loss among these; None if there is none."""
    return next((name for name in LOSSES if name in names), None)


def no_step(path: Path, names: Iterable[str], step_key: str | None) -> str:
    """Error message for a log whose records have these names."""
    wanted = f"no number under {step_key!r}" if step_key else "no step"
    have = ", ".join(names) or "no fields"
    return f"{path}: {wanted} in its records, whose fields are: {have}; name the step with step_key= (--step-key)"


SENTENCES = 10  # most skipped lines or records that are described
BATCH = 4096  # records held as objects at a time


@dataclass(slots=True)
class Skipped:
    """Lines or records that a read skipped."""

    count: int = 0
    sentences: list[str] = field(default_factory=list)
    """Descriptions of the first ten."""

    def note(self, sentence: str, count: int = 1) -> None:
        self.count += count
        if len(self.sentences) < SENTENCES:
            self.sentences.append(sentence)

    def include(self, run: str, skipped: Skipped) -> None:
        """Add what was skipped in reading one of several runs."""
        for sentence in skipped.sentences:
            self.note(f"{run}: {sentence}")
        self.count += skipped.count - len(skipped.sentences)

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        rest = self.count - len(self.sentences)
        return "; ".join([*self.sentences, *([f"and {rest:,} more"] if rest > 0 else [])])


def named(
    records: Iterable[tuple[int, Record]], naming: Naming, skipped: Skipped, what: str = "line"
) -> Iterator[Record]:
    """The records, each given with its number, under dalsegno's names.

    The only door for what files contain, whatever it is: a record that comes out has a step that a float can hold, a
    timestamp that is a date, a finite epoch, and names and values that JSON in UTF-8 can hold. Records without a step
    and values that are none of this are left out, and noted. Integers beyond the range of floats become infinite.
    """
    renames = naming.renames()
    for number, record in records:
        renamed = _renamed(_sound(record, what, number, skipped), renames)
        if renamed is None:
            skipped.note(f"{what} {number}: no number under {naming.step!r}")
            continue
        for name, (low, high) in BOUNDS.items():
            value: Any = renamed.get(name)
            if not (low < value < high if is_number(value) else value is None or isinstance(value, str)):
                skipped.note(f"{what} {number}: {name} {value!r:.40} is left out")
                renamed = {other: value for other, value in renamed.items() if other != name}
        yield renamed


def named_at_once(records: list[Record], naming: Naming, *, has_nulls: bool) -> RecordBlock | None:
    """As :func:`named`, several times as fast, for records whose names and values JSON can hold: checks columns as a
    whole. None if something would be left out; the records may have changed then."""
    if renames := naming.renames():
        if any(ours in record for ours in renames.values() for record in records):
            return None
        records = [{renames.get(name, name): value for name, value in record.items()} for record in records]
    columns: dict[str, Column] = {}
    for name, (low, high) in {"global_step": (-EXACT, EXACT), **BOUNDS}.items():
        found = [record.get(name) for record in records]
        is_whole = name == "global_step" or type(None) not in {*map(type, found)}
        there = found if is_whole else [value for value in found if value is not None]
        if not {*map(type, there)} <= {int, float}:
            return None
        numbers = np.array(there, np.float64)
        if not ((low < numbers) & (numbers < high)).all():
            return None
        if is_whole:
            columns[name] = Column(None, numbers)
    given = [record.get("kind") for record in records]
    if not {*map(type, given)} <= {str, type(None)} or HEADER in given:
        return None
    known: dict[tuple[str, ...], str] = {}  # without nulls, the names tell the kind
    for record, kind in zip(records, given, strict=True):
        if kind is None:
            names = tuple(record)
            if has_nulls or names not in known:
                known[names] = kind_of(record)
            record["kind"] = known[names]
    return RecordBlock(records, columns)


def _renamed(record: Record, renames: Mapping[str, str]) -> Record | None:
    """The record under dalsegno's names, with its kind; None if it has no step and is not the header."""
    if record.get("kind") == HEADER:
        return record
    if renames:  # a field that already has the name gets a suffix: some programs log "step" and "global_step"
        taken = {ours: f"{ours}_" for ours in renames.values()}
        record = {renames.get(name) or taken.get(name, name): value for name, value in record.items()}
    step: Any = record.get("global_step")
    if not (is_number(step) and abs(step) < EXACT):  # NaN is not
        return None
    if isinstance(time := record.get("timestamp"), str) and (seconds := moment(time)) is not None:
        record = {**record, "timestamp": seconds}
    return record if record.get("kind") in KINDS else {**record, "kind": kind_of(record)}


def _sound(record: Record, what: str, number: int, skipped: Skipped) -> Record:
    """The record without what JSON in UTF-8 cannot hold; itself if it contains no such name or value."""
    wrong = [] if "".join(record).isascii() else [name for name in record if not is_json(name)]
    huge: Record = {}
    for name, value in record.items():
        kind = type(value)
        if kind is int and not -BEYOND_FLOATS < value < BEYOND_FLOATS:
            huge[name] = math.inf if value > 0 else -math.inf
        elif kind not in _PLAIN and not is_json(value):
            wrong.append(name)
    for name in wrong:
        skipped.note(f"{what} {number}: the {type(record[name]).__name__} under {name!r:.40} is left out")
    return {name: value for name, value in {**record, **huge}.items() if name not in wrong} if wrong or huge else record


def is_json(value: object, levels: int = DEEPEST) -> bool:
    """Whether the value is one of JSON, no deeper than ``levels``."""
    if isinstance(value, str):
        return value.isascii() or not _SURROGATE.search(value)
    if isinstance(value, (list, dict)):
        inside = value.values() if isinstance(value, dict) else value
        return levels > 0 and all(is_json(each, levels - 1) for each in inside)
    return value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < BEYOND_FLOATS)


def without_headers(lines: bytes) -> tuple[bytes, list[Record]]:
    """JSON lines without those of headers, and the headers. Names of a header occur nowhere else."""
    kept, headers, begin, place = [], [], 0, 0
    while (place := lines.find(b'"header"', place)) >= 0:
        first, place = lines.rfind(b"\n", 0, place) + 1, lines.find(b"\n", place) + 1 or len(lines)
        with suppress(ValueError):
            if (record := record_in(lines[first:place]) or {}).get("kind") == HEADER:
                headers.append(record)
                kept.append(lines[begin:first])
                begin = place
    return b"".join([*kept, lines[begin:]]), headers


def own_records(path: Path, skipped: Skipped) -> Iterator[Record]:
    """The records of another log that dalsegno writes, such as a tail that was cut off."""
    report = ReadReport()
    records = named(enumerate(read_records(path, report), start=1), OURS, skipped, f"{path.name}: record")
    yield from (record for record in records if record["kind"] != HEADER)
    for sentence in report.skipped:
        skipped.note(f"{path.name}: {sentence}")


class Source(ABC):
    """One log. Its records use dalsegno's names: ``timestamp`` (UTC seconds), ``kind`` (in every record),
    ``global_step``, ``epoch``."""

    program: ClassVar[str]
    """Program that writes the format."""
    unit: ClassVar[str] = "record"
    """What :meth:`read` numbers."""

    def __init__(self, path: Path, step_key: str | None = None) -> None:
        self.path = path
        self.step_key = step_key
        """Key of the step in its records; None: one of the usual names."""

    @abstractmethod
    def read(self, skipped: Skipped) -> Iterator[tuple[int, Record]]:
        """Yield what the file contains as it is, each with its number; what is not a record is noted in ``skipped``."""

    def naming(self) -> Naming:
        """The names in what :meth:`read` yields."""
        return OURS

    def records(self, skipped: Skipped, kind: str | None = None) -> Iterator[Record]:
        """Yield the records in the order of the file; see :func:`named`. Those of other kinds than ``kind`` may be left
        out."""
        return named(self.read(skipped), self.naming(), skipped, self.unit)

    def blocks(self, skipped: Skipped) -> Iterator[Block]:
        """Yield the records as columns, a part of the log at a time, without the header."""
        records = (record for record in self.records(skipped) if record["kind"] != HEADER)
        while batch := list(islice(records, BATCH)):
            yield RecordBlock(batch)

    def files(self) -> list[Path]:
        """The log's files."""
        return [self.path]

    def changed(self) -> float:
        """UTC seconds of the last change to the log's files."""
        return max(path.stat().st_mtime for path in self.files() or [self.path])

    def stamp(self) -> tuple[int, ...]:
        """A value that changes when the log does."""
        status = [path.stat() for path in self.files()]
        return tuple(number for each in status for number in (each.st_ino, each.st_size, each.st_mtime_ns))


class Unreadable(Source):
    """A file or directory that may be a log and cannot be opened."""

    program = "unreadable"

    def __init__(self, path: Path, error: OSError | ConfigurationError) -> None:
        super().__init__(path)
        self._error = error

    def _fail(self, *_: object, **__: object) -> NoReturn:
        error = self._error
        if isinstance(error, ConfigurationError):
            raise error
        raise ConfigurationError(f"{error.filename or self.path}: cannot be read: {error.strerror or error}")

    read = files = _fail
