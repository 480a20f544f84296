"""One file of tensors: laid out in memory as it will lie on disk, streamed there, mapped back.

The file is plain safetensors, so any reader of that format opens it. Its header is padded with spaces until the
tensors begin at a page boundary; they follow without gaps, wide element types first, so that each lies aligned. What a
tensor is a part of (its offsets in the whole and the whole's shape) stands in the header's ``__metadata__``. Element
types that not every reader of safetensors knows travel as bytes, with one more dimension; their name stands there too.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from dalsegno import files
from dalsegno.errors import DamagedCheckpoint

from .manifest import FileRecord, opened

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_AS_BYTES = "complex128 complex64 complex32 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"

DTYPES: dict[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_NAMES} | {
    name: getattr(torch, name) for name in _AS_BYTES.split() if hasattr(torch, name)
}
"""Every element type that a checkpoint can hold, by torch's name for it."""


KNOWN = frozenset(DTYPES.values())


def name_of(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def is_shape(value: object) -> bool:
    """Whether ``value``, read from disk, is a list of dimensions that no arithmetic overflows on."""
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(size) is int and 0 <= size < 1 << 48 for size in value)
    )


def byte_count(shape: Sequence[int], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return count


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor in a file: a whole one, or the box of ``shape`` that begins at ``offsets`` in one of shape ``whole``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def entire(cls, name: str, tensor: torch.Tensor) -> Piece:
        shape = tuple(tensor.shape)
        return cls(name, tensor.dtype, shape, (0,) * len(shape), shape)

    @property
    def size(self) -> int:
        """In bytes."""
        return byte_count(self.shape, self.dtype)


class StagedFile:
    """A file in the making. Its buffer is kept from save to save: fresh memory costs more than the copy into it."""

    def __init__(self, name: str) -> None:
        self.name = name  # relative to the checkpoint
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._memory = memoryview(b"")
        self._length = 0

    def lay_out(self, pieces: Sequence[Piece]) -> list[tuple[int, int]]:
        """Make room for ``pieces``; gives where each lies in the file: first byte, and the byte after its last."""
        spans: list[tuple[int, int]] = [(0, 0)] * len(pieces)
        end = 0
        order = sorted(range(len(pieces)), key=lambda number: -pieces[number].dtype.itemsize)
        for number in order:
            spans[number] = (end, end + pieces[number].size)
            end += pieces[number].size
        header = _header([(pieces[number], spans[number]) for number in order])
        self._length = len(header) + end
        self._reserve(self._length)
        self._memory[: len(header)] = header
        return [(len(header) + begin, len(header) + end) for begin, end in spans]

    def fill(self, span: tuple[int, int], tensor: torch.Tensor) -> None:
        """Copy a tensor, from whatever device and with whatever strides, to its place."""
        if not tensor.numel():
            return
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            # One memory move. torch's copy waits for threads of its own, up to ten times as long on a busy machine.
            self._memory[slice(*span)] = tensor.reshape(-1).view(torch.uint8).numpy().data
        else:
            self._buffer[slice(*span)].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def write_to(self, directory: Path) -> FileRecord:
        """Stream the file to the disk, durably, and give its size and checksum."""
        checksum = xxhash.xxh3_128()
        files.write_direct(directory / self.name, self._memory, self._length, checksum.update)
        return FileRecord(self._length, checksum.hexdigest())

    def _reserve(self, length: int) -> None:
        if length > len(self._memory):
            memory = mmap.mmap(-1, -(-length // files.PAGE) * files.PAGE)
            self._memory = memoryview(memory)
            self._buffer = torch.frombuffer(memory, dtype=torch.uint8)


def _header(placed: Sequence[tuple[Piece, tuple[int, int]]]) -> bytes:
    entries: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for piece, span in placed:
        known = SAFETENSORS_NAMES.get(piece.dtype)
        shape = list(piece.shape) if known else [*piece.shape, piece.dtype.itemsize]
        entries[piece.name] = {"dtype": known or "U8", "shape": shape, "data_offsets": list(span)}
        if piece.shape != piece.whole or not known:
            part = {"offsets": piece.offsets, "shape": piece.whole, "dtype": name_of(piece.dtype)}
            parts[piece.name] = part
    metadata = {"format": "pt"} | ({"parts": json.dumps(parts)} if parts else {})
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    padding = -(8 + len(text)) % files.PAGE
    return (len(text) + padding).to_bytes(8, "little") + text + b" " * padding


class MappedFile:
    """A file of tensors on disk, its bytes mapped into memory.

    Raises:
        DamagedCheckpoint: if it is no plain file, or too short to be one of ours.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path) as descriptor:
            if os.fstat(descriptor).st_size < 8:
                raise DamagedCheckpoint(f"{path}: not a file of tensors")
            self._memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)

    def tensor(self, span: tuple[int, int], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The tensor of ``dtype`` and ``shape`` at ``span``, without a copy: valid while the file is mapped."""
        begin, end = span
        if not 0 <= begin <= end <= len(self._memory) or end - begin != byte_count(shape, dtype):
            raise DamagedCheckpoint(
                f"{self.path}: bytes {begin} to {end} are no {name_of(dtype)} of shape {list(shape)} in it"
            )
        if begin == end:
            return torch.empty(list(shape), dtype=dtype)
        raw = torch.frombuffer(self._memory, dtype=torch.uint8, count=end - begin, offset=begin)
        if begin % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(list(shape))

    def spans(self) -> dict[str, tuple[int, int]]:
        """Where each tensor lies, read from the file's own header."""
        length = int.from_bytes(self._memory[:8], "little")
        if length > len(self._memory) - 8:
            raise DamagedCheckpoint(f"{self.path}: its header is cut off")
        try:
            header = json.loads(self._memory[8 : 8 + length])
            header.pop("__metadata__", None)
            offsets = {name: entry["data_offsets"] for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{self.path}: its header is not one of safetensors ({error!r})") from error
        if not all(is_shape(span) and len(span) == 2 for span in offsets.values()):
            raise DamagedCheckpoint(f"{self.path}: its header has data_offsets that are none")
        return {name: (8 + length + begin, 8 + length + end) for name, (begin, end) in offsets.items()}
