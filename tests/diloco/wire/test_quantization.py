"""int8 with a scale per group of elements: sizes, bounds on the error, what a file of it contains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.diloco.server.files import Scratch, SpareFiles, TensorFile, spooled
from dalsegno.diloco.server.outer import BLOCK
from dalsegno.diloco.wire.signature import GROUP, TensorSpec, as_received, as_sent, coded_size, element_count, quantize
from dalsegno.errors import ConfigurationError
from diloco.scenes import Given


@given(st.integers(0, 10_000))
def test_the_number_of_elements_is_known_from_the_size(count: int) -> None:
    assert element_count(coded_size(count)) == count


@given(st.integers(0, 2 * GROUP + 3), st.floats(1e-30, 1e30), st.integers(0, 1000))
@settings(deadline=None)
def test_an_element_is_at_most_half_a_scale_away(count: int, size: float, seed: int) -> None:
    given_ = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * size
    received = as_received(given_)
    for begin in range(0, count, GROUP):
        group = given_[begin : begin + GROUP]
        allowed = group.abs().max() / 127 * (0.5 + 1e-4)
        assert (received[begin : begin + GROUP] - group).abs().max() <= allowed


def test_zeros_stay_zeros() -> None:
    assert not as_received(torch.zeros(3, 100)).any()


def write(folder: Path, tensor: torch.Tensor) -> TensorFile:
    specs = as_sent((TensorSpec("w", tensor.dtype, tuple(tensor.shape)),), bf16=True, int8=True)
    with spooled(SpareFiles(folder), specs, Given(specs, {"w": quantize(tensor)})) as arrived:
        return TensorFile(arrived.path, specs)


def test_a_file_is_read_in_blocks(tmp_path: Path) -> None:
    tensor = torch.randn(BLOCK + 5 * GROUP + 3, generator=torch.Generator().manual_seed(0))
    file = write(tmp_path, tensor)
    scratch = Scratch()
    blocks = [file.block("w", begin, min(BLOCK, len(tensor) - begin), scratch).clone() for begin in (0, BLOCK)]
    assert torch.equal(torch.cat(blocks), as_received(tensor))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_found(tmp_path: Path, bad: float) -> None:
    tensor = torch.ones(3 * GROUP)
    write(tmp_path, tensor)
    tensor[2 * GROUP + 1] = bad
    with pytest.raises(ConfigurationError, match="w contains NaN or infinity"):
        write(tmp_path, tensor)
