"""Reading tensors: any box into any target; files that change or cannot be read meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import jobs
from checkpoint.parts import Saved
from dalsegno.checkpoint import CheckpointManager
from dalsegno.checkpoint.file_writing import StreamedFile
from dalsegno.checkpoint.sharding import Box
from dalsegno.checkpoint.tensor_files import FileLayout, StoredFile, TensorChunk
from dalsegno.system import filesystem
from dalsegno.testing import run_ranks

SIZES = st.lists(st.integers(0, 9), max_size=4)
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("read")


@settings(max_examples=150)
@given(shape=SIZES, dtype=st.sampled_from(DTYPES), data=st.data())
def test_any_box_into_anything(folder: Path, shape: list[int], dtype: torch.dtype, data: st.DataObject) -> None:
    """Whatever the shape, the box, and the target's type and strides; also where few rows are read at once."""
    whole = (torch.arange(torch.Size(shape).numel()) % 7).to(dtype).reshape(shape)
    layout = FileLayout.of([TensorChunk("other", torch.float64, (3,), (0,), (3,)), TensorChunk.entire("it", whole)])
    file = StreamedFile("file", layout, [torch.ones(3).double(), whole])
    file.write_to(folder, int)
    stored = StoredFile(folder / "file")
    assert torch.equal(stored.tensor(layout.spans[1], dtype, shape), whole)
    begins = [data.draw(st.integers(0, size)) for size in shape]
    sizes = [data.draw(st.integers(0, size - begin)) for begin, size in zip(begins, shape, strict=True)]
    box = Box(tuple(begins), tuple(sizes))
    expected = whole
    for dimension, (begin, length) in enumerate(zip(begins, sizes, strict=True)):
        expected = expected.narrow(dimension, begin, length)
    target = torch.zeros(expected.shape, dtype=data.draw(st.sampled_from([dtype, torch.complex128])))
    if data.draw(st.booleans()) and shape:
        target = target.mT.contiguous().mT if len(shape) > 1 else torch.zeros(2 * len(target), dtype=target.dtype)[::2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem, "DIRECT_PIECE", data.draw(st.sampled_from([1, 100, 16 << 20])))
        stored.fill(target, layout.spans[1], dtype, shape, box)
    assert torch.equal(target, expected.to(target.dtype))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("cut", "DamagedCheckpoint: {}: was truncated while it was read"),
        ("no disk", "OSError: [Errno 5] Input/output error: '{}'"),
        ("no server", "OSError: [Errno 116] Stale file handle: '{}'"),
    ],
)
def test_a_file_that_fails_when_half_of_it_is_loaded(tmp_path: Path, what: str, message: str) -> None:
    """An error that names it. Mapped into memory, such a file ends the process."""
    (error,) = run_ranks(jobs.load_while_a_file_fails, 1, tmp_path, what)
    assert error == message.format(tmp_path / "checkpoints/step-00000001/model/shard-00000.safetensors")


def test_what_was_loaded_hangs_on_no_file(tmp_path: Path) -> None:
    """A restored state is independent of the checkpoint's files."""
    manager, saved = CheckpointManager(tmp_path), Saved()
    saved.save(manager, 1)
    assert run_ranks(jobs.load_and_empty_the_files, 1, tmp_path) == [[1.0, 1.0, 1.0]]
