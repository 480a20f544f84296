"""Formats of a log file, selected by its suffix. Both have one record per line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dalsegno.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Format:
    """Layout of records in a file: ``head record record … foot``; each append moves the foot."""

    head: bytes
    before_first: bytes
    before_next: bytes
    after: bytes
    foot: bytes

    def append(self, line: bytes, *, first: bool) -> bytes:
        """Return the bytes to append for ``line``, without the foot."""
        return (self.before_first if first else self.before_next) + line + self.after


JSON_LINES = Format(head=b"", before_first=b"", before_next=b"", after=b"\n", foot=b"")
JSON_ARRAY = Format(head=b"[", before_first=b"\n", before_next=b",\n", after=b"", foot=b"\n]\n")

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Written at the start of text files by some Windows programs."""

_BY_SUFFIX = {".jsonl": JSON_LINES, ".json": JSON_ARRAY}


def format_of(path: Path) -> Format:
    """Return JSON lines for ``.jsonl``; for ``.json`` one JSON array, which is valid after every append.

    Raises:
        ConfigurationError: for any other suffix.
    """
    try:
        return _BY_SUFFIX[path.suffix]
    except KeyError:
        raise ConfigurationError(
            f"log path {str(path)!r}: the suffix must be .jsonl (one record per line) or .json (a JSON array)"
        ) from None


def numbered(stem: str) -> tuple[str, int]:
    """Split ``train-2``, the successor of ``train`` (number 1) after another program wrote to it, into name, number."""
    name, dash, number = stem.rpartition("-")
    return (name, int(number)) if dash and number.isdecimal() else (stem, 1)


def strip_line(line: bytes) -> bytes:
    """Return the record in a line of either format; empty if the line contains only a bracket."""
    record = line.strip().removeprefix(_BYTE_ORDER_MARK).removesuffix(b",")
    return b"" if record in (b"[", b"]") else record
