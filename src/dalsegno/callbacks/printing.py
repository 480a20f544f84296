"""What callbacks print for people: lines and bars, on a stream whose failure does not end the training."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TextIO

from tqdm.auto import tqdm

logger = logging.getLogger(__name__)


class Output:
    """A stream to print to. Characters that its encoding lacks are escaped.

    Once it cannot be written to (its reader is gone, its disk is full), that is logged, and nothing more is printed
    there.

    Args:
        stream: None: the ``standard`` one of ``sys`` at each write, and nothing where the process has none.
    """

    def __init__(self, stream: TextIO | None = None, standard: Literal["stdout", "stderr"] = "stdout") -> None:
        self._given = stream
        self._standard = standard
        self._failed: TextIO | None = None

    @property
    def _stream(self) -> Any:
        return getattr(sys, self._standard) if self._given is None else self._given

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def fileno(self) -> int:
        """tqdm asks its terminal how wide it is."""
        descriptor: int = self._stream.fileno()
        return descriptor

    def __eq__(self, other: object) -> bool:
        """tqdm clears its bars before a line on the same stream, or if both are standard ones."""
        return self._stream is (other._stream if isinstance(other, Output) else other)

    __hash__ = None  # type: ignore[assignment]  # equal to a stream that hashes by identity

    def say(self, line: str) -> None:
        """Print a line, above the bars if there are any."""
        tqdm.write(line, file=self)
        self.flush()

    def write(self, text: str) -> None:
        self._try("write", text.encode(self.encoding, "backslashreplace").decode(self.encoding))

    def flush(self) -> None:
        self._try("flush")

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def _try(self, method: str, *arguments: str) -> None:
        stream = self._stream
        if stream is None or stream is self._failed:
            return
        try:
            getattr(stream, method)(*arguments)
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self._failed = stream
            if stream in (sys.__stdout__, sys.__stderr__):  # what it buffers must not fail Python's flush at exit
                with suppress(OSError, ValueError), Path(os.devnull).open("w") as nothing:
                    os.dup2(nothing.fileno(), stream.fileno())
            name = getattr(stream, "name", type(stream).__name__)
            logger.warning("%s cannot be written to, so nothing more is printed there: %s", name, error)


STDOUT = Output()
