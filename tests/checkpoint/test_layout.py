"""A file of tensors: readable by every safetensors reader, and correct on each path of its bytes to the disk."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from checkpoint.sameness import bits
from dalsegno.checkpoint.file_writing import PendingFile, StagedFile, StreamedFile
from dalsegno.checkpoint.index import StoredTensor
from dalsegno.checkpoint.sharding import Box, ListedChunks, StoredChunk
from dalsegno.checkpoint.staging import Buffer, Copying
from dalsegno.checkpoint.tensor_files import DTYPES, FileLayout, StoredFile, TensorChunk
from dalsegno.checkpoint.tensor_reader import ChunkReader
from dalsegno.errors import DamagedCheckpoint, StateMismatch
from dalsegno.system import filesystem


def kept(layout: FileLayout, tensors: Sequence[torch.Tensor], buffer: Buffer) -> PendingFile:
    """From a copy."""
    buffer.lay_out(layout)
    copying = Copying()
    file = StagedFile("some.safetensors", buffer, copying.add(buffer, tensors))
    copying.run()
    return file


def live(layout: FileLayout, tensors: Sequence[torch.Tensor], buffer: Buffer) -> PendingFile:
    """From the tensors themselves."""
    return StreamedFile("some.safetensors", layout, tensors)


Source = Callable[[FileLayout, Sequence[torch.Tensor], Buffer], PendingFile]


@pytest.fixture(params=[kept, live])
def source(request: pytest.FixtureRequest) -> Source:
    return request.param  # type: ignore[no-any-return]


def write(directory: Path, tensors: dict[str, torch.Tensor], source: Source, buffer: Buffer | None = None) -> Path:
    layout = FileLayout.of([TensorChunk.entire(name, tensor) for name, tensor in tensors.items()])
    file = source(layout, list(tensors.values()), buffer or Buffer())
    counts: list[int] = []
    record = file.write_to(directory, counts.append)
    path = directory / file.name
    content = path.read_bytes()
    assert (record.size, record.xxh3) == (len(content), xxhash.xxh3_128_hexdigest(content))
    assert sum(counts) == len(content)
    return path


def of_every_type() -> dict[str, torch.Tensor]:
    counted = {name: torch.arange(3 * dtype.itemsize, dtype=torch.uint8).view(dtype) for name, dtype in DTYPES.items()}
    return counted | {"bool": torch.tensor([True, False, True])}


def of_every_shape() -> dict[str, torch.Tensor]:
    complex_pair = torch.arange(4.0).view(torch.complex64)
    return {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.5),
        "turned": torch.arange(200_000.0).reshape(400, 500).T,
        "small and turned": torch.arange(6.0).reshape(2, 3).T,
        "conjugated": complex_pair.conj(),
        "negative": complex_pair.conj().imag,
        "large": torch.arange(70_000.0),
    }


def test_safetensors_reads_it(tmp_path: Path, source: Source) -> None:
    tensors = {**of_every_type(), "empty": torch.empty(0, 3), "scalar": torch.tensor(1.5)}
    read = load_file(write(tmp_path, tensors, source))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert bits(read[name]) == bits(tensor), name
    assert read["float32"].dtype == torch.float32 and read["scalar"].shape == ()


def test_tensors_with_any_strides(tmp_path: Path, source: Source) -> None:
    tensors = of_every_shape()
    stored = StoredFile(write(tmp_path, tensors, source))
    for name, span in stored.spans().items():
        assert torch.equal(stored.tensor(span, tensors[name].dtype, tensors[name].shape), tensors[name]), name


def test_tensors_begin_at_a_page_and_lie_aligned(tmp_path: Path, source: Source) -> None:
    path = write(
        tmp_path, {"odd": torch.ones(3, dtype=torch.uint8), "wide": torch.ones(2, dtype=torch.float64)}, source
    )
    spans = StoredFile(path).spans()
    assert spans == {"wide": (4096, 4112), "odd": (4112, 4115)}
    assert path.stat().st_size == 4115


def test_a_buffer_that_is_used_again(tmp_path: Path) -> None:
    buffer = Buffer()
    for length in (5000, 3, 9000):
        tensor = torch.full((length,), length % 251, dtype=torch.uint8)
        assert torch.equal(load_file(write(tmp_path, {"x": tensor}, kept, buffer))["x"], tensor)


def test_memory_that_is_touched_ahead_changes_nothing(tmp_path: Path) -> None:
    big = torch.arange(1_000_000)
    layout = FileLayout.of([TensorChunk.entire("x", big)])
    for turns in (0, 1, 100):
        buffer = Buffer()
        assert buffer.missing(layout) == layout.length
        buffer.lay_out(layout)
        assert buffer.missing(layout) == 0
        for _ in islice(buffer.prefault(), turns):
            pass
        assert torch.equal(load_file(write(tmp_path, {"x": big}, kept, buffer))["x"], big)


def test_more_than_one_direct_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Source) -> None:
    monkeypatch.setattr(filesystem, "DIRECT_PIECE", 2 * filesystem.PAGE)
    big = torch.arange(30_000, dtype=torch.int32)
    assert torch.equal(load_file(write(tmp_path, {"big": big}, source))["big"], big)


def test_where_direct_writes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Source) -> None:
    """As on some network disks, which open the file and refuse the write; tmpfs refused to open it until lately."""
    monkeypatch.setattr(filesystem, "DIRECT_PIECE", 2 * filesystem.PAGE)
    refused = []

    def write_unless_direct(descriptor: int, data: Any, write: Any = os.write) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(len(data))
            raise OSError(errno.EINVAL, "no direct writes here")
        return int(write(descriptor, data))

    monkeypatch.setattr(os, "write", write_unless_direct)
    operations: list[str] = []
    monkeypatch.setattr(filesystem, "watcher", lambda what, _: operations.append(what))
    big = torch.arange(30_000, dtype=torch.int32)
    assert torch.equal(load_file(write(tmp_path, {"big": big}, source))["big"], big)
    assert len(refused) == 1
    assert len(operations) > 20  # each piece is on the disk before the next: one can see that something moves
    assert operations[1:] == ["write", "fsync"] * ((len(operations) - 3) // 2) + ["truncate", "fsync"]


def test_where_direct_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Source) -> None:
    def open_unless_direct(path: Any, flags: int, *rest: Any, open: Any = os.open) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct files here")
        return int(open(path, flags, *rest))

    monkeypatch.setattr(os, "open", open_unless_direct)
    big = torch.arange(3_000, dtype=torch.int32)
    assert torch.equal(load_file(write(tmp_path, {"big": big}, source))["big"], big)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04}",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{]",
        (12).to_bytes(8, "little") + b'{"x": [1, 2]}',
        (30).to_bytes(8, "little") + b'{"x": {"data_offsets": [0,-3]}}'[:30],
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
    ],
)
def test_a_file_that_is_no_safetensors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"bad\.safetensors"):
        StoredFile(path).spans()


def test_what_another_program_calls_parts(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    save_file({"x": torch.ones(2)}, path, metadata={"parts": "backbone,head"})
    assert StoredFile(path).entries() == {"x": (torch.float32, (2,))}


def test_a_dtype_that_is_no_text(tmp_path: Path) -> None:
    header = b'{"x": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}'
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(StateMismatch, match="dtype"):
        StoredFile(path).entries()


class There:
    """The files in a folder, and which of them were opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[str] = []

    def require(self, names: Collection[str]) -> None: ...

    def file(self, name: str) -> Path:
        self.opened.append(name)
        return self.folder / name


def stored(shape: tuple[int, ...], file: str, name: str) -> StoredTensor:
    return StoredTensor(torch.float32, shape, ListedChunks([StoredChunk(file, name, Box.whole(shape))]))


def test_a_shape_that_no_file_has_takes_no_memory(tmp_path: Path) -> None:
    write(tmp_path, {"x": torch.zeros(3)}, kept)
    with pytest.raises(DamagedCheckpoint, match="are not a float32 of shape"):
        ChunkReader(There(tmp_path)).full_tensor(stored((1 << 47, 1 << 47), "some.safetensors", "x"))


def test_tensors_in_turns_from_several_files_open_each_once(tmp_path: Path) -> None:
    for file in "ab":
        save_file({name: torch.full((2,), float(ord(name))) for name in "wxyz"}, tmp_path / file)
    files = There(tmp_path)
    reader = ChunkReader(files)
    for name in "wxyz":
        for file in "ab":
            assert reader.full_tensor(stored((2,), file, name)).tolist() == [float(ord(name))] * 2
    assert files.opened == ["a", "b"]


def test_bytes_that_are_not_there(tmp_path: Path) -> None:
    path = write(tmp_path, {"x": torch.zeros(3)}, kept)
    with pytest.raises(DamagedCheckpoint, match=r"bytes 4096 to 9000 are not a float32 of shape \[1226\]"):
        StoredFile(path).tensor((4096, 9000), torch.float32, [1226])
