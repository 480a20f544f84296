"""RecordLog: a file that one record after the other is appended to, and that a resume cuts back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from dalsegno.errors import ConfigurationError
from dalsegno.system import filesystem

from .formats import format_of
from .rewind import Position, RewindReport, rewind, step_of, tail_hash
from .values import encode


class RecordLog:
    """An append-only log file with rewind.

    ``path`` is relative to ``root``, the run's ``output_dir``, or absolute and inside it. Its suffix chooses
    the shape: ``.jsonl`` is a JSON object a line, ``.json`` a JSON array that is valid after every append.
    ``header``: gives the first record of each new file.

    Raises:
        ConfigurationError: for another suffix, or a path outside of ``root``.
    """

    _open_here: ClassVar[WeakValueDictionary[Path, RecordLog]] = WeakValueDictionary()  # two would mix their bytes

    def __init__(
        self, path: str | Path, root: str | Path, header: Callable[[], Mapping[str, Any] | None] = lambda: None
    ) -> None:
        self._root = Path(root).absolute()
        if self._root not in (self._root / path).parents or ".." in Path(path).parts:
            raise ConfigurationError(f"log path {str(path)!r}: must lie inside output_dir ({self._root})")
        self._path = self._root / path
        self._format = format_of(self._path)
        self._header = header
        self._claimed = self._path
        self._configured = PurePosixPath(self._path.relative_to(self._root))
        self._descriptor: int | None = None
        self._closing = threading.Lock()  # the number of a closed descriptor may be another file's
        self._offset = 0
        self._records = 0
        self._last_step: int | None = None

    @property
    def path(self) -> Path:
        """The file that is written; not always the one asked for, see :meth:`open`."""
        return self._path

    @property
    def records(self) -> int:
        """How many records lie before the next one."""
        return self._records

    def open(self, saved: Any = None) -> RewindReport:
        """Go on where ``saved``, a state of :meth:`state`, was taken; from the beginning without one.

        What the file holds beyond that is moved into ``rewound/`` beside it, never deleted. If the file is
        not the one that was saved, it stays untouched and the log goes on in ``<name>-2``, which later states
        then name. Takes time in proportion to what is cut off, not to the file.

        Raises:
            StateMismatch: if ``saved`` is no such state, or that of another log.
            ConfigurationError: if another log of this process has the same path.
        """
        self.close()
        position = None if saved is None else Position.from_state(saved)
        self._claim()
        try:
            report = self._go_on(position)
            self._begin()
        except BaseException:
            self.close()
            raise
        return report

    def append(self, record: Mapping[str, Any]) -> None:
        """Write ``record`` behind the others: one ``write``, in the kernel's hands when this returns.

        If the file was deleted, moved away, replaced or cut meanwhile, the log goes on as :meth:`open` would from here,
        with a warning: at worst in a new file, never in one that nobody can find.

        Raises:
            CannotSave: if a value is nothing that JSON can hold; nothing is written then.
            OSError: if the disk is full, say. No half record stays, and the next one can be tried.
        """
        line = encode(record)
        if not self._is_in_place(self._opened()):
            self._go_on(self._position())
        self._begin()
        self._write(line)
        step = step_of(record.get("global_step"))
        self._last_step = self._last_step if step is None else step

    def state(self) -> dict[str, Any]:
        """How far the log has come: what :meth:`open` takes. Whoever keeps it calls :meth:`make_durable` too."""
        return self._position().to_state()

    def make_durable(self) -> None:
        """Force all records to the disk; nothing happens if the log is closed. On any thread, beside appends."""
        with self._closing:
            if self._descriptor is not None:
                filesystem.fsync(self._descriptor, self._path)

    def close(self) -> None:
        """Close the file. Closing twice is nothing."""
        self._release()
        if self._open_here.get(self._claimed) is self:
            del self._open_here[self._claimed]

    def _release(self) -> None:
        with self._closing:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _position(self) -> Position:
        tail = tail_hash(self._opened(), self._offset)
        path = self._path.relative_to(self._root).as_posix()
        return Position(path, self._offset, self._records, self._last_step, tail)

    def _is_in_place(self, descriptor: int) -> bool:
        """Whether the file that is written is still the one of that name, and as long as it was left."""
        own = os.fstat(descriptor)
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(own, found) and own.st_size == self._offset + len(self._format.foot)

    def _go_on(self, position: Position | None) -> RewindReport:
        """Whatever fails here leaves the log as it was."""
        report = rewind(self._root, self._configured, position)
        filesystem.make_directory(report.path.parent)
        is_new = not report.path.exists()
        descriptor = filesystem.open_own(report.path, os.O_RDWR | os.O_CREAT)
        self._release()
        self._path, self._descriptor = report.path, descriptor
        self._offset, self._records, self._last_step = report.offset, report.records, report.last_step
        self._end_after_offset()
        if is_new:
            filesystem.fsync_directory(self._path.parent)
        return report

    def _begin(self) -> None:
        """The header, where the file has no record yet."""
        if self._records == 0 and (header := self._header()) is not None:
            self._write(encode(header))

    def _write(self, record: bytes) -> None:
        descriptor = self._opened()
        line = self._format.append(record, first=self._records == 0)
        end = self._offset + len(line)
        try:
            os.lseek(descriptor, self._offset, os.SEEK_SET)
            filesystem.write_all(descriptor, line + self._format.foot, self._path)
            self._offset, self._records = end, self._records + 1
        except BaseException:
            if self._offset != end:  # a full disk, or Ctrl-C between two writes: no half record stays
                self._end_after_offset()
            raise

    def _claim(self) -> None:
        if self._open_here.setdefault(self._claimed, self) is not self:
            raise ConfigurationError(
                f"{self._claimed}: another logger writes this file; give one of them another path="
            )

    def _opened(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"{self._path}: the log is closed; open() it first")
        return self._descriptor

    def _end_after_offset(self) -> None:
        """Let the file end with the last record and the foot. Writes nothing where it does already."""
        descriptor, head, foot = self._opened(), self._format.head, self._format.foot
        if self._records == 0 and os.pread(descriptor, len(head), 0) != head:
            filesystem.write_all(descriptor, head, self._path)
        if os.pread(descriptor, len(foot) + 1, self._offset) == foot:
            return
        if foot:  # before the cut: a last line without its newline would pass for a torn one
            os.lseek(descriptor, self._offset, os.SEEK_SET)
            filesystem.write_all(descriptor, foot, self._path)
        filesystem.truncate(descriptor, self._offset + len(foot), self._path)
