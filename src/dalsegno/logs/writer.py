"""RecordLog: an append-only file of records, rewound on resume."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from dalsegno.errors import ConfigurationError
from dalsegno.logs.reader import format_of
from dalsegno.system import durability, filesystem

from .repeats import RecordDifference, Repeats
from .rewind import Position, RewindReport, cut, rewind, tail_hash
from .values import encode, step_of


class RecordLog:
    """An append-only log file with rewind.

    ``path`` is inside ``root``, the run's ``output_dir``, and relative to it or absolute. Its suffix selects the
    format: ``.jsonl`` is one JSON object per line, ``.json`` a JSON array that is valid after every append. ``header``
    returns the first record of each new file. Raises ConfigurationError for another suffix, or a path outside ``root``.
    """

    _open_here: ClassVar[WeakValueDictionary[Path, RecordLog]] = WeakValueDictionary()  # two writers would mix bytes

    def __init__(
        self, path: str | Path, root: str | Path, header: Callable[[], Mapping[str, Any] | None] = lambda: None
    ) -> None:
        self._root = Path(root).absolute()
        if self._root not in (self._root / path).parents or ".." in Path(path).parts:
            raise ConfigurationError(f"log path {str(path)!r}: must be inside output_dir ({self._root})")
        self._path = self._root / path
        self._format = format_of(self._path)
        self._header = header
        self._claimed = self._path
        self._configured = PurePosixPath(self._path.relative_to(self._root))
        self._descriptor: int | None = None
        self._closing = threading.Lock()  # a closed descriptor's number may be reused for another file
        self._offset = 0
        self._records = 0
        self._last_step: int | None = None
        self._repeats: Repeats | None = None

    @classmethod
    def difference_in(cls, root: str | Path) -> RecordDifference | None:
        """The first repeated record of this process's open logs in ``root`` that is not the one that was cut off."""
        found = (each._repeats.difference for each in cls._repeating(root) if each._repeats is not None)
        return next((difference for difference in found if difference is not None), None)

    @classmethod
    def repeats_until(cls, root: str | Path) -> int:
        """Step of the last record that was cut off a log in ``root`` and is repeated by this process; 0 if none is."""
        return max((each._repeats.until for each in cls._repeating(root) if each._repeats is not None), default=0)

    @classmethod
    def stop_comparing(cls, root: str | Path) -> None:
        """Compare no more records of the logs in ``root`` with those that were cut off."""
        for each in cls._repeating(root):
            each._repeats = None

    @classmethod
    def _repeating(cls, root: str | Path) -> list[RecordLog]:
        place = Path(root).absolute()
        return [each for each in list(cls._open_here.values()) if each._root == place and each._repeats is not None]

    @property
    def path(self) -> Path:
        """The file that is written; may differ from the configured one, see :meth:`open`."""
        return self._path

    @property
    def records(self) -> int:
        """Number of records in the log."""
        return self._records

    def open(self, saved: Any = None) -> RewindReport:
        """Continue at ``saved``, a result of :meth:`state`; without it, start from scratch.

        What the file contains beyond ``saved`` is moved into ``rewound/`` beside it, never deleted. If the file is not
        the one that was saved, it stays unchanged and the log continues in ``<name>-2``, which later states refer to.
        Takes time proportional to the removed part, not to the file. Raises StateMismatch if ``saved`` is malformed, or
        belongs to another log; ConfigurationError if another log of this process has the same path."""
        self.close()
        position = None if saved is None else Position.from_state(saved)
        if self._open_here.setdefault(self._claimed, self) is not self:
            raise ConfigurationError(
                f"{self._claimed}: another logger writes this file; give one of them another path="
            )
        try:
            report = self._reopen(position)
            if report.action == "rewound" and report.archived is not None:
                self._repeats = Repeats(report.archived, report.path)
            self._write_header()
        except BaseException:
            self.close()
            raise
        return report

    def append(self, record: Mapping[str, Any]) -> None:
        """Append ``record`` by one ``write``; the kernel has it when this returns.

        If the file was deleted, moved, replaced or truncated meanwhile, the log continues as :meth:`open` would from
        here, with a warning: at worst in a new file, never in one without a name. Raises CannotSave if JSON cannot
        represent a value; nothing is written; OSError e.g. if the disk is full. No partial record stays; the next
        append can be tried."""
        line = encode(record)
        if not self._is_in_place(self._opened()):
            self._reopen(self._position())
        self._write_header()
        self._write(line)
        step = step_of(record.get("global_step"))
        self._last_step = self._last_step if step is None else step

    def state(self) -> dict[str, Any]:
        """Return the position for :meth:`open`. A caller that saves it also calls :meth:`make_durable`."""
        return self._position().to_state()

    def make_durable(self) -> None:
        """Fsync all records; does nothing if the log is closed. On any thread, concurrently with appends. Raises
        NotDurable if an fsync of the directory has failed in this process: the file's name may be lost."""
        with self._closing:
            if self._descriptor is not None:
                durability.expect_durable(self._path)
                filesystem.fsync(self._descriptor, self._path)

    def close(self) -> None:
        """Close the file. Further calls do nothing."""
        self._close_file()
        self._repeats = None
        if self._open_here.get(self._claimed) is self:
            del self._open_here[self._claimed]

    def _close_file(self) -> None:
        with self._closing:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _position(self) -> Position:
        tail = tail_hash(self._opened(), self._offset)
        path = self._path.relative_to(self._root).as_posix()
        return Position(path, self._offset, self._records, self._last_step, tail)

    def _is_in_place(self, descriptor: int) -> bool:
        """Whether the path still refers to the open file, with the length that was last written."""
        own = os.fstat(descriptor)
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(own, found) and own.st_size == self._offset + len(self._format.foot)

    def _reopen(self, position: Position | None) -> RewindReport:
        """Open the file to continue at ``position``. A failure leaves the log as it was, unless the name of the file
        cannot be flushed. It may be there without: the process that created it may have been killed."""
        report = rewind(self._root, self._configured, position)
        filesystem.make_directory(report.path.parent)
        descriptor = filesystem.open_own(report.path, os.O_RDWR | os.O_CREAT)
        self._close_file()
        self._path, self._descriptor = report.path, descriptor
        self._offset, self._records, self._last_step = report.offset, report.records, report.last_step
        cut(self._opened(), self._path, self._offset, is_empty=self._records == 0)
        durability.flush_name(self._path)
        return report

    def _write_header(self) -> None:
        """Write the header if the file has no record yet."""
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
            if self._repeats is not None:
                self._repeats.compare(record)
        except BaseException:
            if self._offset != end:  # a full disk, or Ctrl-C between two writes: remove the partial record
                cut(self._opened(), self._path, self._offset, is_empty=self._records == 0)
            raise

    def _opened(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"{self._path}: the log is closed; open() it first")
        return self._descriptor
