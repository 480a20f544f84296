"""Files of tensors: their layout, and reading them.

A file is plain safetensors, readable by any reader of that format. Its header is padded with spaces so that the tensors
begin at a page boundary; they follow without gaps, wide dtypes first, so that each is aligned. For a chunk of a tensor,
the header's ``__metadata__`` has its offsets and the full shape. Dtypes that not every reader of safetensors knows are
stored as bytes, with one more dimension; ``__metadata__`` has their name.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dalsegno.checkpoint.file_reading import METADATA, HeaderEntry, naming, opened, read_header
from dalsegno.checkpoint.sharding import Box
from dalsegno.distributed.stage_places import is_on_other_stage
from dalsegno.errors import CannotSave, DamagedCheckpoint, StateMismatch
from dalsegno.stateful.schema import Must
from dalsegno.system import filesystem

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
"""Every dtype that a checkpoint can contain, by torch's name."""

_KNOWN = frozenset(DTYPES.values())
_LARGEST_SIZE = 1 << 48  # elements in one dimension
_MOST_DIMENSIONS = 64
_DTYPES_OF_SAFETENSORS = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


def name_of(constant: torch.dtype | torch.layout | torch.qscheme) -> str:
    """``float32`` for ``torch.float32``."""
    return str(constant).removeprefix("torch.")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is dense, with data, and of a dtype and shape that a file can contain."""
    if tensor.layout != torch.strided or tensor.dtype not in _KNOWN or tensor.is_meta or tensor.is_nested:
        return False
    is_small = 0 < tensor.numel() < _LARGEST_SIZE or max(tensor.shape, default=0) < _LARGEST_SIZE
    return is_small and tensor.dim() <= _MOST_DIMENSIONS


_TENSORS = (torch.Tensor, nn.Parameter)  # a subclass may hide its data


def is_dense(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether this is a tensor that can be saved as it is, here or by the rank that stores it."""
    memory = value._local_tensor if type(value) is DTensor else value
    return type(memory) in _TENSORS and (is_plain(memory) or is_on_other_stage(value))


def is_shape(value: object) -> bool:
    """Whether ``value``, possibly read from disk, is a list of dimensions on which no arithmetic overflows."""
    return (
        isinstance(value, list)
        and len(value) <= _MOST_DIMENSIONS
        and all(type(size) is int and 0 <= size < _LARGEST_SIZE for size in value)
    )


Shape = Annotated[list[Any], Must("a list of dimensions", is_shape)]
"""A shape or offsets in a file of JSON."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements in order, as a 1-D tensor of bytes: a view if the tensor is contiguous, else a copy."""
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    # as_strided: a single element may have any stride, which view(dtype) refuses
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def byte_count(shape: Sequence[int], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return count


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A tensor in a file: a full one, or the box of ``shape`` at ``offsets`` in a tensor of shape ``whole``."""

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
        return byte_count(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Position of each chunk in a file: ``spans`` from its first byte to that after its last, without gaps; ``order``:
    numbers of the chunks in the order of their positions."""

    header: bytes
    chunks: Sequence[TensorChunk]
    spans: Sequence[tuple[int, int]]
    order: Sequence[int]
    length: int

    @classmethod
    def of(cls, chunks: Sequence[TensorChunk], further: Mapping[str, str] | None = None) -> FileLayout:
        """``further``: entries of the header's ``__metadata__`` for other readers."""
        spans: list[tuple[int, int]] = [(0, 0)] * len(chunks)
        end = 0
        order = sorted(range(len(chunks)), key=lambda number: -chunks[number].dtype.itemsize)
        for number in order:
            spans[number] = (end, end + chunks[number].size)
            end += chunks[number].size
        header = _header([(chunks[number], spans[number]) for number in order], further or {})
        size = len(header)
        return cls(header, chunks, [(size + first, size + last) for first, last in spans], order, size + end)


def _header(placed: Sequence[tuple[TensorChunk, tuple[int, int]]], further: Mapping[str, str]) -> bytes:
    if any(chunk.name == METADATA for chunk, _ in placed):
        raise CannotSave(f"cannot save a tensor named {METADATA}, which safetensors reserves; rename it")
    entries: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for chunk, span in placed:
        known = SAFETENSORS_NAMES.get(chunk.dtype)
        shape = list(chunk.shape) if known else [*chunk.shape, chunk.dtype.itemsize]
        entries[chunk.name] = {"dtype": known or "U8", "shape": shape, "data_offsets": list(span)}
        if chunk.shape != chunk.whole or not known:
            part = {"offsets": chunk.offsets, "shape": chunk.whole, "dtype": name_of(chunk.dtype)}
            parts[chunk.name] = part
    metadata = {"format": "pt", **further} | ({"parts": json.dumps(parts)} if parts else {})
    text = json.dumps({METADATA: metadata, **entries}, separators=(",", ":")).encode()
    padding = -(8 + len(text)) % filesystem.PAGE
    return (len(text) + padding).to_bytes(8, "little") + text + b" " * padding


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dimension, (begin, length) in enumerate(zip(box.offsets, box.shape, strict=True)):
        tensor = tensor.narrow(dimension, begin, length)
    return tensor


class StoredFile:
    """A file of tensors on disk. All reads are copies: of a memory-mapped file, a page that cannot be read would kill
    the process with SIGBUS, and tensors would change with the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path) as descriptor:
            self._length = os.fstat(descriptor).st_size
            if self._length < 8:
                raise DamagedCheckpoint(f"{path}: not a safetensors file")
            self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)

    def tensor(self, span: tuple[int, int], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        self.check(span, dtype, shape)
        memory = torch.empty(span[1] - span[0], dtype=torch.uint8)
        self._read(memory, span[0])
        return memory.view(dtype).view(list(shape))

    def fill(
        self,
        target: torch.Tensor,
        span: tuple[int, int],
        dtype: torch.dtype,
        shape: Sequence[int],
        box: Box,
    ) -> None:
        """Copy a box of the tensor at ``span`` into ``target``, on any device. Needs little memory."""
        self.check(span, dtype, shape)
        if not shape:
            target.copy_(self.tensor(span, dtype, shape))
            return
        row = byte_count(shape[1:], dtype)
        begin, count = span[0] + box.offsets[0] * row, box.shape[0]
        if box.shape[1:] == tuple(shape[1:]) and target.dtype == dtype and _is_plain_memory(target):
            self._read(target.view(-1).view(torch.uint8), begin)
            return
        at_once = max(1, filesystem.DIRECT_PIECE // max(1, row))
        bounce = torch.empty(min(count, at_once) * row, dtype=torch.uint8)
        for done in range(0, count, at_once):
            rows = min(at_once, count - done)
            memory = bounce[: rows * row]
            self._read(memory, begin + done * row)
            of_these_rows = Box((0, *box.offsets[1:]), (rows, *box.shape[1:]))
            target[done : done + rows].copy_(part(memory.view(dtype).view(rows, *shape[1:]), of_these_rows))

    def check(self, span: tuple[int, int], dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Raises DamagedCheckpoint if a tensor of ``dtype`` and ``shape`` cannot be at ``span``."""
        begin, end = span
        if not 0 <= begin <= end <= self._length or end - begin != byte_count(shape, dtype):
            raise DamagedCheckpoint(
                f"{self.path}: bytes {begin} to {end} are not a {name_of(dtype)} of shape {list(shape)} in it"
            )

    def _read(self, memory: torch.Tensor, begin: int) -> None:
        place = memory.numpy().data
        with naming(self.path):
            while place:
                count = os.preadv(self._descriptor, [place], begin)
                if count == 0:
                    raise DamagedCheckpoint(f"{self.path}: was truncated while it was read")
                place, begin = place[count:], begin + count

    def spans(self) -> dict[str, tuple[int, int]]:
        return {name: entry.span for name, entry in self.header().items()}

    def entries(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each tensor. Raises StateMismatch for a dtype that only other readers of safetensors
        know."""
        entries = {}
        for name, entry in self.header().items():
            kind, shape = entry.kind, entry.shape
            if type(kind) is not str or kind not in _DTYPES_OF_SAFETENSORS:
                raise StateMismatch(f"{self.path}: {name} has the dtype {kind!r}, which this dalsegno does not support")
            dtype = _DTYPES_OF_SAFETENSORS[kind]
            if not is_shape(shape):
                raise DamagedCheckpoint(f"{self.path}: {name} has the shape {shape!r}")
            self.check(entry.span, dtype, shape)
            entries[name] = (dtype, tuple(shape))
        return entries

    def header(self) -> Mapping[str, HeaderEntry]:
        with naming(self.path):
            return read_header(self.path, self._descriptor)


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether its bytes are contiguous; checks the stride too, which may be any if there is one element."""
    is_packed = tensor.is_contiguous() and tensor.stride(-1) == 1
    return is_packed and tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()
