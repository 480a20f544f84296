"""One file of tensors: laid out, and read back.

The file is plain safetensors, so any reader of that format opens it. Its header is padded with spaces until the
tensors begin at a page boundary; they follow without gaps, wide element types first, so that each lies aligned. What a
tensor is a part of (its offsets in the whole and the whole's shape) stands in the header's ``__metadata__``. Element
types that not every reader of safetensors knows travel as bytes, with one more dimension; their name stands there too.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dalsegno.errors import CannotSave, DamagedCheckpoint, StateMismatch
from dalsegno.system import filesystem

from .manifest import opened

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

_METADATA = "__metadata__"
_KNOWN = frozenset(DTYPES.values())
_LARGEST_HEADER = 100_000_000  # bytes: what other readers of safetensors take, too
_DTYPES_OF_SAFETENSORS = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


def name_of(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has elements, one beside the other, that a file can hold."""
    has_elements = tensor.layout == torch.strided and tensor.dtype in _KNOWN and not tensor.is_meta
    return has_elements and is_shape(list(tensor.shape))


def is_shape(value: object) -> bool:
    """Whether ``value``, maybe read from disk, is a list of dimensions that no arithmetic overflows on."""
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(size) is int and 0 <= size < 1 << 48 for size in value)
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as one row of bytes, in their order: its own memory, if they lie there like that."""
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    # A single element may have any stride, which no view of another type takes.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def byte_count(shape: Sequence[int], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return count


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A tensor in a file: a whole one, or the box of ``shape`` that begins at ``offsets`` in one of shape ``whole``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def entire(cls, name: str, tensor: torch.Tensor) -> TensorChunk:
        shape = tuple(tensor.shape)
        return cls(name, tensor.dtype, shape, (0,) * len(shape), shape)

    @property
    def size(self) -> int:
        """In bytes."""
        return byte_count(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where each chunk lies in a file: ``spans`` are its first byte and the byte after its last. No gap is between one
    chunk and the next."""

    header: bytes
    chunks: Sequence[TensorChunk]
    spans: Sequence[tuple[int, int]]
    length: int

    @classmethod
    def of(cls, chunks: Sequence[TensorChunk]) -> FileLayout:
        spans: list[tuple[int, int]] = [(0, 0)] * len(chunks)
        end = 0
        order = sorted(range(len(chunks)), key=lambda number: -chunks[number].dtype.itemsize)
        for number in order:
            spans[number] = (end, end + chunks[number].size)
            end += chunks[number].size
        header = _header([(chunks[number], spans[number]) for number in order])
        size = len(header)
        return cls(header, chunks, [(size + first, size + last) for first, last in spans], size + end)


def _header(placed: Sequence[tuple[TensorChunk, tuple[int, int]]]) -> bytes:
    if any(chunk.name == _METADATA for chunk, _ in placed):
        raise CannotSave(f"cannot save a tensor with the name {_METADATA}, which safetensors has for itself; rename it")
    entries: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for chunk, span in placed:
        known = SAFETENSORS_NAMES.get(chunk.dtype)
        shape = list(chunk.shape) if known else [*chunk.shape, chunk.dtype.itemsize]
        entries[chunk.name] = {"dtype": known or "U8", "shape": shape, "data_offsets": list(span)}
        if chunk.shape != chunk.whole or not known:
            part = {"offsets": chunk.offsets, "shape": chunk.whole, "dtype": name_of(chunk.dtype)}
            parts[chunk.name] = part
    metadata = {"format": "pt"} | ({"parts": json.dumps(parts)} if parts else {})
    text = json.dumps({_METADATA: metadata, **entries}, separators=(",", ":")).encode()
    padding = -(8 + len(text)) % filesystem.PAGE
    return (len(text) + padding).to_bytes(8, "little") + text + b" " * padding


class StoredFile:
    """A file of tensors on disk. Whatever is read of it is a copy.

    It is not mapped into memory: a page that could not be read would end the process at once, by SIGBUS, and whoever
    keeps a tensor would depend on what becomes of the file.

    Raises:
        DamagedCheckpoint: if it is no plain file, or too short to be one of ours.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path) as descriptor:
            self._length = os.fstat(descriptor).st_size
            if self._length < 8:
                raise DamagedCheckpoint(f"{path}: not a file of tensors")
            self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)

    def tensor(self, span: tuple[int, int], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The tensor of ``dtype`` and ``shape`` at ``span``."""
        self._check(span, dtype, shape)
        memory = torch.empty(span[1] - span[0], dtype=torch.uint8)
        self._read(memory, span[0])
        return memory.view(dtype).view(list(shape))

    def fill(
        self,
        target: torch.Tensor,
        span: tuple[int, int],
        dtype: torch.dtype,
        shape: Sequence[int],
        box: Sequence[tuple[int, int]],
    ) -> None:
        """Copy a box of the tensor at ``span`` into ``target``, on whatever device. Costs little memory.

        Args:
            target: of the box's shape.
            box: where it begins, and its length, in each dimension.
        """
        self._check(span, dtype, shape)
        if not shape:
            target.copy_(self.tensor(span, dtype, shape))
            return
        (first, count), *inner = box
        row = byte_count(shape[1:], dtype)
        begin = span[0] + first * row
        is_whole_rows = all(each == (0, size) for each, size in zip(inner, shape[1:], strict=True))
        if is_whole_rows and target.dtype == dtype and _is_plain_memory(target):
            self._read(target.view(-1).view(torch.uint8), begin)
            return
        at_once = max(1, filesystem.DIRECT_PIECE // max(1, row))
        bounce = torch.empty(min(count, at_once) * row, dtype=torch.uint8)
        for done in range(0, count, at_once):
            rows = min(at_once, count - done)
            memory = bounce[: rows * row]
            self._read(memory, begin + done * row)
            part = memory.view(dtype).view(rows, *shape[1:])
            for dimension, (at, length) in enumerate(inner, 1):
                part = part.narrow(dimension, at, length)
            target[done : done + rows].copy_(part)

    def _check(self, span: tuple[int, int], dtype: torch.dtype, shape: Sequence[int]) -> None:
        begin, end = span
        if not 0 <= begin <= end <= self._length or end - begin != byte_count(shape, dtype):
            raise DamagedCheckpoint(
                f"{self.path}: bytes {begin} to {end} are no {name_of(dtype)} of shape {list(shape)} in it"
            )

    def _read(self, memory: torch.Tensor, begin: int) -> None:
        """Fill ``memory``, plain bytes, with those of the file from ``begin`` on.

        Raises:
            DamagedCheckpoint: if the file has become shorter.
            OSError: if it cannot be read, which says nothing about it.
        """
        place = memory.numpy().data
        try:
            while place:
                count = os.preadv(self._descriptor, [place], begin)
                if count == 0:
                    raise DamagedCheckpoint(f"{self.path}: has lost its end while it was being read")
                place, begin = place[count:], begin + count
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def spans(self) -> dict[str, tuple[int, int]]:
        """Where each tensor lies, read from the file's own header."""
        begin, header = self._header()
        return {name: (begin + span[0], begin + span[1]) for name, (_, _, span) in header.items()}

    def entries(self) -> dict[str, tuple[torch.dtype, tuple[int, ...], tuple[int, int]]]:
        """Type, shape and place of each tensor, read from the header; each lies in the file and is as long as it says.

        Raises:
            DamagedCheckpoint: if that is not so.
            StateMismatch: for an element type that only other readers of safetensors know.
        """
        begin, header = self._header()
        entries = {}
        for name, (kind, shape, span) in header.items():
            if kind not in _DTYPES_OF_SAFETENSORS:
                raise StateMismatch(f"{self.path}: {name} is of type {kind!r}, which is not known here")
            dtype, place = _DTYPES_OF_SAFETENSORS[kind], (begin + span[0], begin + span[1])
            if not is_shape(shape):
                raise DamagedCheckpoint(f"{self.path}: {name} has the shape {shape!r}")
            self._check(place, dtype, shape)
            entries[name] = (dtype, tuple(shape), place)
        return entries

    def _header(self) -> tuple[int, dict[str, tuple[Any, Any, list[int]]]]:
        """Where the tensors begin; and of each its type, shape, and offsets from there, as the header tells them."""
        length = int.from_bytes(self._bytes(0, 8), "little")
        if length > self._length - 8:
            raise DamagedCheckpoint(f"{self.path}: its header is cut off")
        if length > _LARGEST_HEADER:
            raise DamagedCheckpoint(f"{self.path}: its header is larger than any of safetensors")
        try:
            header = json.loads(self._bytes(8, length))
            header.pop(_METADATA, None)
            entries = {
                name: (entry.get("dtype"), entry.get("shape"), entry["data_offsets"]) for name, entry in header.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{self.path}: its header is not one of safetensors ({error!r})") from error
        if not all(is_shape(span) and len(span) == 2 for _, _, span in entries.values()):
            raise DamagedCheckpoint(f"{self.path}: its header has data_offsets that are none")
        return 8 + length, entries

    def _bytes(self, begin: int, length: int) -> bytes:
        memory = torch.empty(length, dtype=torch.uint8)
        self._read(memory, begin)
        return memory.numpy().tobytes()


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie one behind the other; where there is only one element, its stride may be any."""
    is_packed = tensor.is_contiguous() and tensor.stride(-1) == 1
    return is_packed and tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()
