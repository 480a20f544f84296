"""Inbox: commands as files in ``<output_dir>/control/``, where no port may be opened, and for runs on a shared disk.

A client writes ``control/NAME.json`` atomically: ``{"command": "set", "data": {"save_steps": 50}, "by": "me"}``. Rank 0
reads and deletes it, and writes ``control/answers/NAME.json``: at once the command's ``id``, or the ``error`` for which
it is refused; later the ``step`` at which it took effect. It is deleted before it is submitted: a kill in between loses
a command that was not acknowledged, rather than carry out one twice.

Any process that can write into the folder can send commands. Requests are bounded, links are not followed, and no file
ends the training, whatever its name and content.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import xxhash

from dalsegno.errors import ConfigurationError, DalsegnoError, NotRunning, StateMismatch
from dalsegno.logs.values import decode
from dalsegno.stateful.schema import Count, check
from dalsegno.system import filesystem
from dalsegno.system.machine import lower_thread_priority

from .jobs import read_small
from .queue import CommandQueue, Ticket

logger = logging.getLogger("dalsegno")

INBOX = "control"
ANSWERS = "answers"

_PERIOD_S = 0.1
_CLOSE_TIMEOUT_S = 1.0
_MOST_AT_ONCE = 100
_MOST_ANSWERS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.json")


class _Request(TypedDict):
    command: str
    data: NotRequired[dict[str, Any]]
    by: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request."""

    id: str | None = None
    """Of the command in ``control.jsonl``; None if it was refused."""
    step: Count | None = None
    """The step at whose end it took effect; None if it has not, or not yet."""
    error: str | None = None
    """Why it was refused, or did not take effect."""
    kind: str | None = None
    """Class of the error, such as ``UnknownName``, if it was refused."""

    @property
    def is_final(self) -> bool:
        return self.step is not None or self.error is not None


class Inbox:
    """Serves the folder on a thread of its own, from :meth:`start` to :meth:`close`."""

    def __init__(self, output_dir: Path, queue: CommandQueue) -> None:
        self._folder = output_dir / INBOX
        self._queue = queue
        self._open: dict[str, Ticket] = {}  # accepted, by the request's name
        self._left_alone: set[str] = set()  # links and folders, which have their answer
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def start(self) -> None:
        """Begin to serve. Requests that are there already were written while no leg was running, and are refused."""
        self._try(self._prepare)
        self._closing.clear()
        self._thread = threading.Thread(target=self._serve, name="dalsegno-inbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer what is open, and end within a second. Further calls do nothing."""
        self._closing.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        lower_thread_priority()
        while not self._closing.wait(_PERIOD_S):
            self._try(self._look)
        self._try(self._look)  # what was sent last, and the outcomes that the end of the leg has brought

    def _try(self, work: Any) -> None:
        """A failure, say of the disk, is logged once; the next look tries again."""
        try:
            work()
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("%s: commands are not read: %s: %s", self._folder, type(error).__name__, error)

    def _prepare(self) -> None:
        for folder in (self._folder, self._folder / ANSWERS):
            filesystem.make_directory(folder)
        self._check_folders()
        answers = sorted((self._folder / ANSWERS).glob("*.json"), key=lambda path: path.lstat().st_mtime)
        for path in answers[:-_MOST_ANSWERS]:
            filesystem.remove(path)
        for name in self._names(most=None):
            self._refuse(name, NotRunning("no leg was running when it was sent; send it again"))

    def _look(self) -> None:
        self._check_folders()
        for name in self._names(most=_MOST_AT_ONCE):
            self._handle(name)
        for name, ticket in [*self._open.items()]:
            if (outcome := ticket.wait(0)) is not None:
                del self._open[name]
                self._answer(name, Answer(ticket.id, outcome.step, outcome.error))

    def _check_folders(self) -> None:
        """Raises OSError if one is a link, which could lead anywhere."""
        for folder in (self._folder, self._folder / ANSWERS):
            if not stat.S_ISDIR(folder.lstat().st_mode):
                raise NotADirectoryError(f"{folder} is not a folder")

    def _names(self, most: int | None) -> list[str]:
        """Requests in the folder, in the order of their names. A name that begins with a dot is still being written."""
        with os.scandir(self._folder) as entries:
            names = {entry.name for entry in entries if entry.name.endswith(".json") and entry.name[0] != "."}
        self._left_alone &= names
        return sorted(names - self._left_alone)[:most]

    def _handle(self, name: str) -> None:
        try:
            if not _NAME.fullmatch(name):
                raise ConfigurationError("its name is not of letters, digits, _ and -, at most 100, and .json")
            text = read_small(self._folder / name)
            filesystem.remove(self._folder / name)
            request = _parse(text)
            ticket = self._queue.submit(
                request["command"], request.get("data", {}), by=request.get("by", f"{INBOX}/{name}")
            )
        except FileNotFoundError:  # its sender has withdrawn it
            return
        except (DalsegnoError, OSError) as error:
            self._refuse(name, error)
            return
        self._open[name] = ticket
        self._answer(name, Answer(ticket.id))

    def _refuse(self, name: str, error: Exception) -> None:
        """Answer with the reason, and delete the request, if it is a file."""
        path = self._folder / name
        with contextlib.suppress(FileNotFoundError):  # its sender has taken it back
            if stat.S_ISREG(path.lstat().st_mode):
                filesystem.remove(path)
            else:
                self._left_alone.add(name)
        self._answer(name, Answer(error=f"{name!r}: {error}"[:1000], kind=type(error).__name__))

    def _answer(self, name: str, answer: Answer) -> None:
        if not _NAME.fullmatch(name):
            name = f"refused-{xxhash.xxh3_64_hexdigest(os.fsencode(name))}.json"
        filesystem.replace_durably(self._folder / ANSWERS / name, json.dumps(asdict(answer)).encode() + b"\n")


def _parse(text: bytes) -> _Request:
    try:
        request = decode(text)
        check(request, _Request, "request")
    except (ValueError, StateMismatch) as error:
        raise ConfigurationError(f'{error}; needs {{"command": …, "data": {{…}}, "by": …}}') from None
    return request  # type: ignore[no-any-return]


def send(
    output_dir: Path,
    command: str,
    data: Mapping[str, Any] | None = None,
    *,
    by: str,
    timeout: float = 10.0,
    for_effect: bool = False,
) -> Answer:
    """Send a command to the job that trains in ``output_dir``, and wait for its answer.

    Args:
        output_dir: of the run, on a disk that rank 0 of the job sees.
        command: its name.
        data: JSON values by field.
        by: who sends it.
        timeout: seconds to wait.
        for_effect: wait for the step at which it takes effect, not only until it is accepted.

    Raises:
        NotRunning: if nothing reads the folder; the command is then withdrawn.
    """
    folder, name = output_dir / INBOX, f"{uuid.uuid4().hex}.json"
    if not folder.is_dir():
        raise NotRunning(f"{folder}: no job has read commands here")
    request = {"command": command, "data": dict(data or {}), "by": by}
    filesystem.replace_durably(folder / name, json.dumps(request).encode())
    deadline, answer = time.monotonic() + timeout, None
    while not (answer is not None and (answer.is_final or not for_effect)) and time.monotonic() < deadline:
        time.sleep(0.02)
        answer = _read_answer(folder / ANSWERS / name) or answer
    if answer is None:
        try:
            (folder / name).unlink()
        except FileNotFoundError:
            raise NotRunning(f"{folder}: read the command, but did not answer; see control.jsonl") from None
        raise NotRunning(f"{folder}: no job has read the command within {timeout:g} s; it is withdrawn")
    (folder / ANSWERS / name).unlink(missing_ok=True)
    return answer


def _read_answer(path: Path) -> Answer | None:
    try:
        content = decode(path.read_bytes())
        check(content, Answer, str(path))
    except FileNotFoundError:
        return None
    except (ValueError, StateMismatch) as error:
        raise NotRunning(f"{path}: not an answer: {error}") from error
    return Answer(**content)
