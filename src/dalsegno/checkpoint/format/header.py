"""Headers of files of tensors: which tensor is at which bytes, and which box of a full tensor it is. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalsegno.errors import DamagedCheckpoint

METADATA = "__metadata__"
"""Entry of a header that is not a tensor; safetensors reserves the name."""

_LARGEST = 100_000_000  # bytes; the limit of other safetensors readers too


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor in a file, unchecked but for ``span``: its first byte in the file, and the byte after its last."""

    kind: Any
    shape: Any
    span: tuple[int, int]
    offsets: tuple[Any, ...] | None
    """Of its first element in the full tensor; None for a full tensor."""


def read_header(path: Path, descriptor: int) -> Mapping[str, HeaderEntry]:
    """Read the header of the open file at ``path``; by the tensors' names.

    Raises:
        DamagedCheckpoint: if it is not a safetensors header, or has parts that dalsegno cannot have written.
        OSError: if it cannot be read, which is not damage.
    """
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(_read(path, descriptor, 0, 8), "little")
    if length > size - 8:
        raise DamagedCheckpoint(f"{path}: its header is truncated")
    if length > _LARGEST:
        raise DamagedCheckpoint(f"{path}: its header is larger than safetensors allows")
    begin = 8 + length
    try:
        header = json.loads(_read(path, descriptor, 8, length))
        parts = _parts((header.pop(METADATA, None) or {}).get("parts"))
        entries = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            if not all(type(each) is int and 0 <= each < 1 << 48 for each in (first, last)):
                raise DamagedCheckpoint(f"{path}: its header has invalid data_offsets")
            offsets = tuple(parts[name]["offsets"]) if name in parts else None
            span = (begin + first, begin + last)
            entries[name] = HeaderEntry(entry.get("dtype"), entry.get("shape"), span, offsets)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: its header is not a safetensors header ({error!r})") from error
    return entries


def _parts(text: Any) -> Mapping[str, Any]:
    """The description that dalsegno writes of the boxes in a file; empty if ``parts`` is another program's."""
    try:
        parts = json.loads(text)
    except (ValueError, TypeError):
        return {}
    return parts if isinstance(parts, dict) else {}


def _read(path: Path, descriptor: int, begin: int, length: int) -> bytes:
    parts = []
    while length:
        part = os.pread(descriptor, length, begin)
        if not part:
            raise DamagedCheckpoint(f"{path}: was truncated while it was read")
        parts.append(part)
        begin, length = begin + len(part), length - len(part)
    return b"".join(parts)
