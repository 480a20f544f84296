"""LineFile: an append-only file of JSON lines, each on disk before the caller continues.

A kill while a line is written leaves a part of it, which acknowledged nothing; the next append removes that part.
"""

from __future__ import annotations

import json
import logging
import os
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from dalsegno.errors import StateMismatch
from dalsegno.stateful import schema
from dalsegno.system import durability, filesystem

from .values import encode, from_json

logger = logging.getLogger("dalsegno")

T = TypeVar("T")


def parser_of(forms: Mapping[str, Any]) -> Callable[[bytes], tuple[str, dict[str, Any]]]:
    """Return a parser of lines whose ``kind`` determines their other fields. ``forms``: a TypedDict for each kind.
    Fields that it does not have are left out."""

    hints = {kind: typing.get_type_hints(form) for kind, form in forms.items()}

    def parse(text: bytes) -> tuple[str, dict[str, Any]]:
        """Return a line's kind and its fields. Raises ValueError, StateMismatch if it is of no known kind, or a field
        is missing or invalid."""
        try:
            record = json.loads(text)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        kind = record.get("kind") if isinstance(record, dict) else None
        form = forms.get(kind) if isinstance(kind, str) else None
        if kind is None or form is None:
            raise ValueError(f"not a line of a known kind: {text[:80]!r}")
        line = {
            name: record[name] if isinstance(record[name], str) and _is_text(hint) else from_json(record[name])
            for name, hint in hints[kind].items()
            if name in record
        }
        schema.check(line, form, kind)
        return kind, line

    return parse


def _is_text(hint: Any) -> bool:
    """Whether a field is a text, even one that reads as a number."""
    return hint is str or str in typing.get_args(hint)


class LineFile(Generic[T]):
    """The file at ``path``. One process writes it at a time.

    Args:
        path: created by the first append.
        parse: returns what a line means; raises ValueError or StateMismatch for an invalid one.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], T]) -> None:
        self.path = path
        self._parse = parse
        self._named: tuple[int, int] | None = None  # the file whose name this object has flushed

    def read(self, *, strict: bool = False) -> Iterator[T]:
        """Yield what the lines mean. A damaged line is skipped with a warning. Raises StateMismatch for a damaged line,
        if ``strict``. ``strict``: skip only a torn last line."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return
        for number, text in enumerate(data.split(b"\n"), start=1):
            if not text.strip():
                continue
            try:
                yield self._parse(text)
            except (ValueError, StateMismatch) as error:
                is_torn = data.endswith(text)
                if strict and not is_torn:
                    raise StateMismatch(f"{self.path}: line {number} is damaged: {error}") from error
                logger.warning("%s: line %d is skipped: %s", self.path, number, error)

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append and fsync. Does nothing without lines.

        After an OSError, say on a full disk, no part of the lines stays in the file. NotDurable, if an fsync of the
        directory fails, is raised by each later call too, also of another LineFile: another fsync would return, whether
        the name is on disk or not.
        """
        text = b"".join(encode(line) + b"\n" for line in lines)
        if not text:
            return
        durability.expect_durable(self.path)
        if not self.path.exists():
            self._named = None  # the new file may get the number of one that was deleted
        descriptor = filesystem.open_own(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            self._repair(descriptor)
            status = os.fstat(descriptor)
            try:
                filesystem.write_all(descriptor, text, self.path)
                filesystem.fsync(descriptor, self.path)
                self._make_name_durable(status)
            except BaseException:
                filesystem.truncate(descriptor, status.st_size, self.path)
                raise
        finally:
            os.close(descriptor)

    def replace(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replace the content, atomically. Raises OSError, say on a full disk, with the content unchanged.

        Raises NotDurable as :meth:`append` does; the content is the former or the new one then.
        """
        durability.replace_durably(self.path, b"".join(encode(line) + b"\n" for line in lines))
        self._named = _identity(self.path.stat())

    def _make_name_durable(self, status: os.stat_result) -> None:
        """Flush the name of each file once: who created it may have been killed before, and the one that is here now
        may not be the one of the last call."""
        if self._named != _identity(status):
            durability.flush_name(self.path)
            self._named = _identity(status)

    def _repair(self, descriptor: int) -> None:
        """End the file with a whole line. An editor may have removed the last newline."""
        size = os.fstat(descriptor).st_size
        if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
            return
        data = os.pread(descriptor, size, 0)
        begin = data.rfind(b"\n") + 1
        try:
            self._parse(data[begin:])
        except (ValueError, StateMismatch):
            logger.warning("%s: its last line was torn by a kill and is removed: %r", self.path, data[begin:][:200])
            filesystem.truncate(descriptor, begin, self.path)
        else:
            filesystem.write_all(descriptor, b"\n", self.path)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
