"""Frames: tensors on the wire, as a safetensors file between a JSON head and a checksum.

::

    8 bytes   magic and version
    4 bytes   length of the head, little endian
    8 bytes   length of the file, little endian
    head      JSON object
    file      safetensors, its header padded as in checkpoints
    16 bytes  xxh3-128 of everything before

Both sides know which tensors a frame has. So the bytes before the first tensor are known in advance and compared as
bytes: nothing that describes a tensor is parsed. Tensors travel in pieces between their memory, or a file, and the
socket; no second copy of them is made.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import xxhash

from dalsegno.checkpoint.format.layout import as_bytes
from dalsegno.errors import ConfigurationError

from .signature import Specs, TensorSpec, file_layout

PIECE = 1 << 20
"""Bytes that are handed to a socket or a file at a time."""

LARGEST_HEAD = 1 << 16
"""Bytes of the JSON head."""

_MAGIC = b"dsegno\x00\x01"
_PREFIX = struct.Struct("<8sIQ")
_DIGEST = 16  # bytes

Head = Mapping[str, Any]


class FrameLayout:
    """The lengths of a frame, and its bytes before the first tensor."""

    def __init__(self, head: Head, specs: Specs) -> None:
        file = file_layout(specs)
        text = json.dumps(head, allow_nan=False).encode()
        if len(text) > LARGEST_HEAD:
            raise ConfigurationError(f"a frame's head has {len(text)} bytes; at most {LARGEST_HEAD} are allowed")
        self.begin = _PREFIX.pack(_MAGIC, len(text), file.length) + text
        self.header = file.header
        self.file_length = file.length
        self.length = len(self.begin) + file.length + _DIGEST
        self.order = in_file_order(specs)


def in_file_order(specs: Specs) -> Specs:
    """Specs in the order of their bytes in a file: wide dtypes first."""
    layout = file_layout(specs)
    return tuple(specs[number] for number in sorted(range(len(specs)), key=lambda number: layout.spans[number]))


def length_limits(specs: Specs) -> tuple[int, int]:
    """The least and the greatest length of a frame with these tensors, whatever its head."""
    least = _PREFIX.size + file_layout(specs).length + _DIGEST
    return least, least + LARGEST_HEAD


class FrameWriter:
    """Writes a frame, tensor by tensor.

    Args:
        write: takes bytes; must have used them when it returns.
        layout: of the frame. Tensors are written in its order.
    """

    def __init__(self, write: Callable[[memoryview], object], layout: FrameLayout) -> None:
        self._write = write
        self._digest = xxhash.xxh3_128()
        self._put(memoryview(layout.begin))
        self._put(memoryview(layout.header))

    def tensor(self, tensor: torch.Tensor) -> None:
        """Write the next tensor, which is on the CPU."""
        memory = as_bytes(tensor.detach()).numpy().data
        for begin in range(0, len(memory), PIECE):
            self._put(memory[begin : begin + PIECE])

    def end(self) -> None:
        """Write the checksum."""
        self._write(memoryview(self._digest.digest()))

    def _put(self, data: memoryview) -> None:
        self._digest.update(data)
        self._write(data)


class FrameReader:
    """Reads a frame, tensor by tensor, into memory of the caller.

    Args:
        read_into: fills a buffer; raises OSError if the frame ends before.
        specs: of the tensors.

    Raises:
        ConfigurationError: if it is not a frame with these tensors, or its checksum differs.
    """

    def __init__(self, read_into: Callable[[memoryview], object], specs: Specs) -> None:
        self._read_into = read_into
        self._digest = xxhash.xxh3_128()
        expected = file_layout(specs)
        head_length, file_length = _unpack(self._bytes(_PREFIX.size))
        self.head = _parse_head(self._bytes(head_length))
        _check_file(file_length, expected.length)
        _check_header(self._bytes(len(expected.header)), expected.header)
        self.order = in_file_order(specs)

    def tensor(self, target: torch.Tensor) -> None:
        """Read the next tensor into ``target``, contiguous and on the CPU."""
        memory = target.view(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(memory), PIECE):
            self._fill(memory[begin : begin + PIECE])

    def end(self) -> None:
        """Compare the checksum."""
        ours = self._digest.digest()
        theirs = bytearray(_DIGEST)
        self._read_into(memoryview(theirs))
        _check_digest(ours, bytes(theirs))

    def _bytes(self, length: int) -> bytes:
        data = bytearray(length)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, memory: memoryview) -> None:
        self._read_into(memory)
        self._digest.update(memory)


class FrameParser:
    """Takes a frame in pieces of any size, and passes its safetensors file on.

    Args:
        specs: of the tensors.
        write: takes the bytes of the file.

    Raises:
        ConfigurationError: on :meth:`feed` and :meth:`end`, if it is not a complete frame with these tensors.
    """

    def __init__(self, specs: Specs, write: Callable[[memoryview], object]) -> None:
        self.head: Head = {}
        self._write = write
        self._file = file_layout(specs)
        self._digest = xxhash.xxh3_128()
        self._held = bytearray()  # of a part that is needed whole
        self._left = self._file.length - len(self._file.header)  # bytes of tensors
        self._parts = self._small_parts()
        self._wanted = next(self._parts)
        self._is_in_tensors = False
        self._trailer = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next piece."""
        view = memoryview(data)
        while len(view):
            if self._is_in_tensors:
                piece, view = view[: self._left], view[self._left :]
                if len(piece):
                    self._digest.update(piece)
                    self._write(piece)
                    self._left -= len(piece)
                if len(view):
                    self._trailer += view
                    if len(self._trailer) > _DIGEST:
                        raise ConfigurationError("the frame is longer than its tensors")
                    return
            else:
                take = self._wanted - len(self._held)
                self._held += view[:take]
                view = view[take:]
                if len(self._held) == self._wanted:
                    part, self._held = bytes(self._held), bytearray()
                    self._digest.update(part)
                    self._next_part(part)

    def end(self) -> None:
        """Check that the frame is complete, and its checksum."""
        if not self._is_in_tensors or self._left or len(self._trailer) != _DIGEST:
            raise ConfigurationError("the frame is incomplete: the connection was cut")
        _check_digest(self._digest.digest(), bytes(self._trailer))

    def _next_part(self, part: bytes) -> None:
        wanted = self._parts.send(part)
        if wanted:
            self._wanted = wanted
        else:
            self._is_in_tensors = True

    def _small_parts(self) -> Any:
        """Yield the length of each part before the tensors, receive the part; at last 0."""
        head_length, file_length = _unpack((yield _PREFIX.size))
        _check_file(file_length, self._file.length)
        self.head = _parse_head((yield head_length))
        header = yield len(self._file.header)
        _check_header(header, self._file.header)
        self._write(memoryview(header))
        yield 0


def frame_pieces(layout: FrameLayout, tensors: Iterable[memoryview]) -> Iterator[memoryview]:
    """A frame, from the bytes of its tensors in its order."""
    digest = xxhash.xxh3_128()
    for piece in chain((memoryview(layout.begin), memoryview(layout.header)), tensors):
        digest.update(piece)
        yield piece
    yield memoryview(digest.digest())


def file_pieces(specs: Specs, tensor_of: Callable[[TensorSpec], torch.Tensor]) -> Iterator[memoryview]:
    """The safetensors file of such tensors, in pieces."""
    yield memoryview(file_layout(specs).header)
    for spec in in_file_order(specs):
        memory = as_bytes(tensor_of(spec)).numpy().data
        for begin in range(0, len(memory), PIECE):
            yield memory[begin : begin + PIECE]


def _unpack(data: bytes) -> tuple[int, int]:
    magic, head_length, file_length = _PREFIX.unpack(data)
    if magic != _MAGIC:
        raise ConfigurationError("not a frame of this version of dalsegno")
    if not 2 <= head_length <= LARGEST_HEAD:
        raise ConfigurationError(f"a frame's head may have 2 to {LARGEST_HEAD} bytes, not {head_length}")
    return head_length, file_length


def _parse_head(data: bytes) -> Head:
    try:
        head = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"a frame's head is not JSON: {error}") from error
    if not isinstance(head, dict):
        raise ConfigurationError("a frame's head must be an object")
    return head


def _check_file(length: int, expected: int) -> None:
    if length != expected:
        raise ConfigurationError(f"the frame has {length} bytes of tensors, header included; expected are {expected}")


def _check_header(header: bytes, expected: bytes) -> None:
    if header != expected:
        raise ConfigurationError("the frame has other tensors than those of this run: another name, dtype or shape")


def _check_digest(ours: bytes, theirs: bytes) -> None:
    if ours != theirs:
        raise ConfigurationError("the frame's checksum differs: its bytes were changed on the way")
