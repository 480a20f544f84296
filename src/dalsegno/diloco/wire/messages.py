"""Messages: what a worker and its server send each other: JSON, and frames of tensors."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
import xxhash

from dalsegno.checkpoint.tensor_files import as_bytes
from dalsegno.diloco.wire.signature import Specs, TensorJson, as_sent, file_layout, fragments_of, specs_from_json
from dalsegno.errors import ConfigurationError
from dalsegno.stateful.schema import Count, Finite, Must, check

_WORKER_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")

# What the server computes from a submission (a mean weighted by samples, steps per second) must stay finite.
LARGEST_LOSS = 1e100
_MOST = 2**53
_LEAST_SECONDS = 1e-9

Positive = Annotated[int, Must("1 or more", lambda count: count >= 1)]
_Samples = Annotated[int, Must(f"1 to {_MOST}", lambda count: 1 <= count <= _MOST)]
_Steps = Annotated[int, Must(f"0 to {_MOST}", lambda count: 0 <= count <= _MOST)]
_Seconds = Annotated[float, Must("0, or 1e-9 or more", lambda time: time == 0 or _LEAST_SECONDS <= time < math.inf)]
_Loss = Annotated[float, Must(f"at most {LARGEST_LOSS:g} in size", lambda loss: abs(loss) <= LARGEST_LOSS)]
WorkerId = Annotated[str, Must("1 to 128 letters, digits, '.', '_' or '-'", _WORKER_ID.fullmatch)]


def check_fields(given: Any, where: str) -> None:
    """Raises ConfigurationError for a field of a dataclass whose value its type does not allow; never shows a token."""
    for name, form in get_type_hints(type(given), include_extras=True).items():
        if name != "token":
            value = getattr(given, name)
            check(value, form, f"{where}: {name}={value!r}", ConfigurationError)


@dataclass(frozen=True, slots=True)
class Settings:
    """What all workers of a run share; fixed by the first one."""

    tensors: list[TensorJson]
    num_fragments: Positive

    def specs(self) -> Specs:
        return specs_from_json(self.tensors)

    def fragments(self) -> list[Specs]:
        return fragments_of(self.specs(), self.num_fragments)


@dataclass(frozen=True, slots=True)
class Submission:
    """The description of a worker's pseudo-gradient."""

    worker_id: WorkerId
    number: Positive
    """Counts the worker's submissions; with ``worker_id`` it identifies this one."""
    base: Count
    """Version of the global parameters that it is relative to."""
    fragment: Count
    bf16: bool
    samples: _Samples
    """Trained on for it: its weight in the mean."""
    steps: _Steps
    seconds: _Seconds
    """Duration of these steps."""
    loss: _Loss | None
    """Of the worker's last step."""
    saved: Count
    """Number of the newest submission that a checkpoint of the worker contains: it never asks for older results."""
    int8: bool = False
    """Whether its elements are :mod:`quantized <.quantization>`; then ``bf16`` does not count."""

    def sent(self, specs: Specs) -> Specs:
        """The form on the wire of a fragment with these parameters."""
        return as_sent(specs, bf16=self.bf16, int8=self.int8)

    @property
    def file_name(self) -> str:
        return f"{self.worker_id}-{self.number:08d}.safetensors"

    @property
    def speed(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class Result:
    """What became of a submission, or of joining."""

    version: Count
    """Of the global parameters, after it."""
    fragment: Count | None = None
    """The fragment that the worker takes; None: all parameters."""
    sync_every: int | None = None
    """Steps to the next submission; None: as the worker was configured."""
    loss: Finite | None = None
    """Mean of the losses of the submissions that were applied with it, with the same weights."""


# --- frames: tensors on the wire, as a safetensors file between a JSON head and a checksum ---------------------------

#     8 bytes   magic and version
#     4 bytes   length of the head, little endian
#     8 bytes   length of the file, little endian
#     head      JSON object
#     file      safetensors, its header padded as in checkpoints
#     16 bytes  xxh3-128 of everything before
#
# Both sides know which tensors a frame has. So the bytes before the first tensor are known in advance and compared as
# bytes: nothing that describes a tensor is parsed. Tensors travel in pieces between their memory, or a file, and the
# socket; no second copy of them is made.


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


class FrameReader:
    """Reads a frame, tensor by tensor, into memory of the caller. ``read_into`` fills a buffer, and raises OSError if
    the frame ends before; ``length`` is that of the frame, if it is known. Raises ConfigurationError if it is not a
    frame with these tensors, or its checksum differs."""

    def __init__(self, read_into: Callable[[memoryview], object], specs: Specs, *, length: int | None = None) -> None:
        self._read_into = read_into
        self._digest = xxhash.xxh3_128()
        expected = file_layout(specs)
        head_length, file_length = _unpack(self._bytes(_PREFIX.size))
        self.head = _parse_head(self._bytes(head_length))
        if file_length != expected.length:
            raise ConfigurationError(
                f"the frame has {file_length} bytes of tensors, header included; expected are {expected.length}"
            )
        if length not in (None, _PREFIX.size + head_length + file_length + _DIGEST):
            raise ConfigurationError(f"the frame is shorter or longer than {length} bytes")
        if self._bytes(len(expected.header)) != expected.header:
            raise ConfigurationError("the frame has other tensors than those of this run: another name, dtype or shape")
        self.order = in_file_order(specs)

    def tensor(self, target: torch.Tensor) -> None:
        """Read the next tensor into ``target``, contiguous and on the CPU."""
        memory = target.view(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(memory), PIECE):
            self.fill(memory[begin : begin + PIECE])

    def fill(self, memory: memoryview) -> None:
        """Read the next bytes of the tensors."""
        self._read_into(memory)
        self._digest.update(memory)

    def end(self) -> None:
        """Compare the checksum."""
        theirs = bytearray(_DIGEST)
        self._read_into(memoryview(theirs))
        if self._digest.digest() != theirs:
            raise ConfigurationError("the frame's checksum differs: its bytes were changed on the way")

    def _bytes(self, length: int) -> bytes:
        data = bytearray(length)
        self.fill(memoryview(data))
        return bytes(data)


def frame_pieces(layout: FrameLayout, tensors: Iterable[memoryview]) -> Iterator[memoryview]:
    """A frame, from the bytes of its tensors in its order. A piece must have been used when the next one is taken."""
    digest = xxhash.xxh3_128()
    for piece in chain((memoryview(layout.begin), memoryview(layout.header)), tensors):
        digest.update(piece)
        yield piece
    yield memoryview(digest.digest())


def bytes_of(tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of tensors on the CPU, in pieces."""
    for tensor in tensors:
        memory = as_bytes(tensor.detach()).numpy().data
        for begin in range(0, len(memory), PIECE):
            yield memory[begin : begin + PIECE]


def head_of_whole_frame(path: Path) -> Head | None:
    """The head of the frame in a file; None if the file is not a frame with the right checksum."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        left = max(0, os.fstat(file.fileno()).st_size - _DIGEST)
        while left and (piece := file.read(min(PIECE, left))):
            digest.update(piece)
            left -= len(piece)
        if file.read() != digest.digest():
            return None
        file.seek(0)
        try:
            length, _ = _unpack(file.read(_PREFIX.size))
            return _parse_head(file.read(length))
        except (ConfigurationError, struct.error):
            return None


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
