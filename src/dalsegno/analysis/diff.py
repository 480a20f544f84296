"""Differences between two logs, record by record, wall-clock fields aside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any

from dalsegno.logs import is_wall_clock

Record = Mapping[str, Any]


class Missing:
    """Value of a field that a record does not have."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()

_PLAIN = {float, int, str, bool, type(None)}


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field whose values differ."""

    field: str
    """Name, or path of a nested field: ``norms.head.weight``, ``history[3]``."""
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class RecordDifference:
    """Two matching records that differ, or a record without a match."""

    step: int | None
    """None for records without one, such as headers."""
    kind: str
    fields: tuple[FieldDifference, ...]
    """Empty if only one log has the record."""
    only_in: str | None = None
    """``"first"`` or ``"second"`` if the other log lacks the record."""


def diff_records(first: Iterable[Record], second: Iterable[Record]) -> Iterator[RecordDifference]:
    """The differences between two logs, in the order of steps. Memory holds the records of one step.

    Records match if they have the same ``global_step`` and ``kind``. Wall-clock fields are ignored (see
    :func:`~dalsegno.logs.is_wall_clock`); numbers must have the same type and bits, and NaN equals NaN.
    """
    ours, theirs = (groupby(records, key=_step) for records in (first, second))
    mine, yours = _next(ours), _next(theirs)
    while mine is not None or yours is not None:
        first_alone = yours is None or (mine is not None and mine[0] < yours[0])
        second_alone = mine is None or (yours is not None and yours[0] < mine[0])
        yield from _in_step(
            mine[1] if mine is not None and not second_alone else [],
            yours[1] if yours is not None and not first_alone else [],
        )
        if not second_alone:
            mine = _next(ours)
        if not first_alone:
            yours = _next(theirs)


def _next(groups: Iterator[tuple[int, Iterator[Record]]]) -> tuple[int, list[Record]] | None:
    return next(((step, list(records)) for step, records in groups), None)


def _in_step(first: list[Record], second: list[Record]) -> Iterator[RecordDifference]:
    for kind in dict.fromkeys(map(_kind, [*first, *second])):
        pairs = zip_longest(*([record for record in each if _kind(record) == kind] for each in (first, second)))
        for mine, yours in pairs:
            step = (mine or yours).get("global_step")
            if mine is None or yours is None:
                yield RecordDifference(step, kind, (), only_in="second" if mine is None else "first")
            elif fields := tuple(_fields(mine, yours)):
                yield RecordDifference(step, kind, fields)


def _fields(mine: Record, yours: Record) -> Iterator[FieldDifference]:
    for name in mine if mine.keys() == yours.keys() else {**mine, **yours}:
        ours, theirs = mine.get(name, MISSING), yours.get(name, MISSING)
        if type(ours) in _PLAIN and _same(ours, theirs):
            continue  # fast path: nearly every field of a log
        if not is_wall_clock(name):
            yield from _inside(name, ours, theirs)


def _inside(name: str, ours: Any, theirs: Any) -> Iterator[FieldDifference]:
    """The differences between two fields, down to their leaves."""
    mine, yours = dict(_leaves(ours, name)), dict(_leaves(theirs, name))
    for path in {**mine, **yours}:
        first, second = mine.get(path, MISSING), yours.get(path, MISSING)
        if not _same(first, second):
            yield FieldDifference(path, first, second)


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}")
    elif isinstance(tree, list) and tree:
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{index}]")
    elif tree is not MISSING:
        yield path, tree


def _same(ours: Any, theirs: Any) -> bool:
    return type(ours) is type(theirs) and bool(ours == theirs or (ours != ours and theirs != theirs))


def _step(record: Record) -> int:
    """The step of a record; -1 without one, so that such records come first."""
    step = record.get("global_step")
    return step if isinstance(step, int) else -1


def _kind(record: Record) -> str:
    return str(record.get("kind", "train"))
