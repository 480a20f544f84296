"""Digests of live tensors: every bit counts, wherever the tensors are and whatever shape they have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoint.frozen import FROZEN, Part
from dalsegno.checkpoint import file_writing
from dalsegno.checkpoint.tensor_files import FileLayout, TensorChunk, as_bytes


def digest_of(*tensors: torch.Tensor) -> bytes:
    layout = FileLayout.of([TensorChunk.entire(str(number), each) for number, each in enumerate(tensors)])
    return file_writing.live_digest(layout, tensors)


def flip(tensor: torch.Tensor, byte: int, bit: int) -> None:
    tensor.view(-1).view(torch.uint8)[byte] ^= 1 << bit


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    """Small ones, which are joined; and large ones, of which the last makes several pieces."""
    drawn = torch.Generator().manual_seed(0)
    sizes = {torch.float32: 3, torch.uint8: 5, torch.float64: 1, torch.bfloat16: 40_001, torch.int32: 3 << 20}
    return [torch.randint(0, 100, (size,), generator=drawn).to(dtype) for dtype, size in sizes.items()]


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_every_bit_counts(
    tensors: list[torch.Tensor], number: int, place: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writing, "_DIGESTED_BYTES", 1 << 16)
    before = digest_of(*tensors)
    assert digest_of(*(each.clone() for each in tensors)) == before
    flip(tensors[number], int(place * (tensors[number].nbytes - 1)), bit=6)
    assert digest_of(*tensors) != before


def test_names_shapes_and_places_count() -> None:
    one, other = torch.arange(6.0), torch.ones(6)
    assert len({digest_of(one, other), digest_of(other, one), digest_of(one.view(2, 3), other), digest_of(one)}) == 4


def test_strides_do_not_count() -> None:
    grid = torch.arange(600_000.0).view(600, 1000)
    assert digest_of(grid.t()) == digest_of(grid.t().contiguous()) != digest_of(grid)
    assert digest_of(grid[:, 3]) == digest_of(grid[:, 3].clone())


def sums(raw: torch.Tensor) -> bytes:
    return torch.cat(file_writing._sums(raw), 1).numpy().tobytes()


@pytest.mark.parametrize("length", [0, 1, 4, 7, 4 << 16, (4 << 16) + 5, 40 * (4 << 16)])
def test_every_bit_counts_in_the_sums_of_a_device(length: int) -> None:
    """Computed here on the CPU. The highest bit of an integer is the one whose products differ in the fewest bits."""
    raw = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    seen = {sums(raw)}
    for byte in {0, length // 3, length // 2, length - 1} & {*range(length)}:
        for bit in (0, 7):
            flip(raw, byte, bit)
            seen.add(sums(raw))
            flip(raw, byte, bit)
    assert sums(raw) in seen
    assert len(seen) == 1 + 2 * len({0, length // 3, length // 2, length - 1} & {*range(length)})


def test_the_sums_of_bytes_at_any_address_are_the_same() -> None:
    raw = torch.randint(0, 256, (1_000_004,), dtype=torch.uint8)
    for begin in range(1, 5):
        assert sums(raw[begin : begin + 1_000_000]) == sums(raw[begin : begin + 1_000_000].clone())


def test_rows_that_have_changed_places_are_noticed() -> None:
    raw = as_bytes(torch.arange(4 << 16, dtype=torch.int32))
    rows = raw.view(4, -1)
    assert sums(raw) != sums(rows[[1, 0, 2, 3]].reshape(-1))


def test_training_draws_the_same_numbers_all_the_same() -> None:
    state = torch.get_rng_state()
    file_writing._keys.cache_clear()
    sums(torch.ones(8, dtype=torch.uint8))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_this_process_has_saved_is_not_hashed_for_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when it has not changed, nor when it has."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("hashed")

    part, inodes = Part(tmp_path), []
    with monkeypatch.context() as patched:
        patched.setattr(file_writing, "record_of", refuse)
        for step in range(1, 6):
            inodes.append((part.save(step) / FROZEN).stat().st_ino)
            if step == 3:
                part.model[0].weight.data[3, 3] += 1
    assert len({*inodes[:3]}) == len({*inodes[3:]}) == 1 and inodes[0] != inodes[4]
    hashed = []
    monkeypatch.setattr(file_writing, "record_of", lambda *content: hashed.append(1) or unchanged_record_of(*content))
    other = Part(tmp_path, seed=1)
    other.load()
    for step in (6, 7):
        assert (other.save(step) / FROZEN).stat().st_ino == inodes[4]
    assert hashed == [1]


unchanged_record_of = file_writing.record_of
