"""Frames: what is written is read, in pieces of any size; nothing else is taken."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from dalsegno.diloco.server.files import SpareFiles, spooled
from dalsegno.diloco.wire.messages import FrameLayout, FrameReader, bytes_of, frame_pieces, in_file_order, length_limits
from dalsegno.diloco.wire.signature import Specs, TensorSpec
from dalsegno.errors import ConfigurationError

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


def specs_of(shapes: list[tuple[torch.dtype, list[int]]]) -> Specs:
    return tuple(TensorSpec(f"p.{number}", dtype, tuple(shape)) for number, (dtype, shape) in enumerate(shapes))


some_specs = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=4
).map(specs_of)


def values(specs: Specs) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {spec.name: torch.randn(spec.shape, generator=generator).to(spec.dtype) for spec in specs}


def frame(head: dict[str, Any], specs: Specs, tensors: dict[str, torch.Tensor]) -> bytes:
    layout = FrameLayout(head, specs)
    written = b"".join(frame_pieces(layout, bytes_of(tensors[spec.name] for spec in layout.order)))
    assert len(written) == layout.length
    return written


def reading(data: bytes) -> Callable[[memoryview], None]:
    stream = io.BytesIO(data)

    def read_into(memory: memoryview) -> None:
        if stream.readinto(memory) != len(memory):
            raise OSError("the end")

    return read_into


def stored(data: bytes, specs: Specs, length: int | None = None) -> tuple[Any, bytes]:
    """What a server stores of a frame: its head, and the file."""
    with TemporaryDirectory() as folder:
        reader = FrameReader(reading(data), specs, length=length)
        with spooled(SpareFiles(Path(folder)), specs, reader) as arrived:
            return reader.head, arrived.path.read_bytes()


@given(some_specs, st.dictionaries(st.text(max_size=5), st.integers()))
@settings(deadline=None)
def test_what_is_written_is_read_and_stored(specs: Specs, head: dict[str, int]) -> None:
    tensors = values(specs)
    data = frame(head, specs, tensors)
    least, most = length_limits(specs)
    assert least <= len(data) <= most
    read, file = stored(data, specs, len(data))
    assert read == head
    loaded = load(file)  # what is on disk is plain safetensors
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    reader = FrameReader(reading(data), specs)
    for spec in reader.order:
        target = torch.empty(spec.shape, dtype=spec.dtype)
        reader.tensor(target)
        assert torch.equal(target, tensors[spec.name])
    reader.end()
    assert reader.head == head


@given(st.data())
@settings(deadline=None)
def test_a_changed_byte_is_noticed(data: st.DataObject) -> None:
    specs = specs_of([(torch.float32, [3]), (torch.bfloat16, [2, 2])])
    good = frame({"number": 7}, specs, values(specs))
    place = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises((ConfigurationError, OSError)):
        stored(bytes(bad), specs)
    with pytest.raises((ConfigurationError, OSError)):
        reader = FrameReader(reading(bytes(bad)), specs)
        for spec in reader.order:
            reader.tensor(torch.empty(spec.shape, dtype=spec.dtype))
        reader.end()


@given(st.data())
@settings(deadline=None)
def test_a_frame_that_is_cut_or_too_long(data: st.DataObject) -> None:
    specs = specs_of([(torch.float32, [3])])
    good = frame({}, specs, values(specs))
    with pytest.raises(OSError, match="the end"):
        stored(good[: data.draw(st.integers(0, len(good) - 1))], specs)
    with pytest.raises(ConfigurationError, match="shorter or longer"):
        stored(good, specs, len(good) + data.draw(st.sampled_from([-1, 1])))


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises((ConfigurationError, OSError)):
        stored(data, specs_of([(torch.float32, [3])]))


@pytest.mark.parametrize(
    "other",
    [
        [(torch.float32, [4])],
        [(torch.float64, [3])],
        [(torch.float32, [3]), (torch.float32, [3])],
    ],
    ids=["shape", "dtype", "another tensor"],
)
def test_other_tensors_are_refused_before_a_byte_of_them(other: list[tuple[torch.dtype, list[int]]]) -> None:
    specs, theirs = specs_of([(torch.float32, [3])]), specs_of(other)
    data = frame({}, theirs, values(theirs))
    left = len(data)

    def read_into(memory: memoryview) -> None:
        nonlocal left
        reading(data[-left:])(memory)
        left -= len(memory)

    with pytest.raises(ConfigurationError, match="tensors"):
        FrameReader(read_into, specs)
    assert left >= 16 + sum(spec.size for spec in theirs)


def test_a_frame_of_the_bytes_of_tensors() -> None:
    specs = specs_of([(torch.float32, [300, 5]), (torch.bfloat16, [7])])
    tensors = values(specs)
    _, file = stored(frame({"a": 1}, specs, tensors), specs)
    layout = FrameLayout({"b": 2}, specs)
    again = b"".join(frame_pieces(layout, [memoryview(file)[len(layout.header) :]]))
    assert len(again) == layout.length
    assert again == frame({"b": 2}, specs, tensors)
    assert [spec.name for spec in in_file_order(specs)] == ["p.0", "p.1"]
