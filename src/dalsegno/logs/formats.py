"""The two shapes of a log file, chosen by its suffix. Both hold one record a line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dalsegno.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Format:
    """How records follow each other in a file: ``head record record … foot``; each append moves the foot."""

    head: bytes
    before_first: bytes
    before_next: bytes
    after: bytes
    foot: bytes

    def append(self, line: bytes, *, first: bool) -> bytes:
        """The bytes that put ``line`` behind what is there, the foot not yet written."""
        return (self.before_first if first else self.before_next) + line + self.after


JSON_LINES = Format(head=b"", before_first=b"", before_next=b"", after=b"\n", foot=b"")
JSON_ARRAY = Format(head=b"[", before_first=b"\n", before_next=b",\n", after=b"", foot=b"\n]\n")

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Some programs for Windows begin a text file with it."""

_BY_SUFFIX = {".jsonl": JSON_LINES, ".json": JSON_ARRAY}


def format_of(path: Path) -> Format:
    """JSON lines for ``.jsonl``, one JSON array, valid after every append, for ``.json``.

    Raises:
        ConfigurationError: for any other suffix.
    """
    try:
        return _BY_SUFFIX[path.suffix]
    except KeyError:
        raise ConfigurationError(
            f"log path {str(path)!r}: the suffix must be .jsonl (a record a line) or .json (a JSON array)"
        ) from None


def numbered(stem: str) -> tuple[str, int]:
    """``("train", 2)`` for ``train-2``, in which a log goes on when somebody else has written in ``train``, its 1."""
    name, dash, number = stem.rpartition("-")
    return (name, int(number)) if dash and number.isdecimal() else (stem, 1)


def strip_line(line: bytes) -> bytes:
    """The record in a line of either shape, or empty where the line holds only a bracket."""
    record = line.strip().removeprefix(_BYTE_ORDER_MARK).removesuffix(b",")
    return b"" if record in (b"[", b"]") else record
