"""Gradients are clipped bit for bit as by torch's ``clip_grad_norm_``, with fewer calls where they are alike."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from dalsegno.distributed.clip_grad import GradientClipping


class Layers(nn.Module):
    def __init__(self, dtype: torch.dtype, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 1, dtype=dtype))
        self.unused = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        dtype = self.layers[0].weight.dtype
        return self.layers(self.embedding(ids).to(dtype)).square().sum()


def with_gradients(dtype: torch.dtype = torch.float32, *, sparse: bool = False) -> list[nn.Parameter]:
    """Of ``unused``: none."""
    model = Layers(dtype, sparse=sparse)
    model(torch.tensor([1, 2, 2, 5])).backward()
    return list(model.parameters())


def gradients(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [each.grad.to_dense() for each in parameters if each.grad is not None]


@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e6])
def test_as_torch_bit_for_bit(max_norm: float) -> None:
    ours, theirs = with_gradients(), with_gradients()
    clip = GradientClipping(ours)
    norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm or float("inf"))
    assert torch.equal(clip(max_norm), norm)
    assert all(map(torch.equal, gradients(ours), gradients(theirs)))


@pytest.mark.parametrize("max_norm", [0.0, 0.1])
def test_sparse_gradients(max_norm: float) -> None:
    ours, dense = with_gradients(sparse=True), with_gradients()
    torch.testing.assert_close(GradientClipping(ours)(max_norm), GradientClipping(dense)(max_norm))
    torch.testing.assert_close(gradients(ours), gradients(dense))


def test_several_dtypes() -> None:
    ours, theirs = with_gradients(torch.float64), with_gradients(torch.float64)
    norm = torch.nn.utils.clip_grad_norm_(theirs, 0.1)
    torch.testing.assert_close(GradientClipping(ours)(0.1), norm, check_dtype=False)
    torch.testing.assert_close(gradients(ours), gradients(theirs))


def test_no_gradient_at_all() -> None:
    assert GradientClipping(list(Layers(torch.float32, sparse=False).parameters()))(1.0) == 0.0


def test_fewer_calls_than_torch() -> None:
    parameters = with_gradients()
    clip = GradientClipping(parameters)
    assert calls_of(lambda: clip(1.0)) < calls_of(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0)) / 3


def calls_of(work: Callable[[], Any]) -> int:
    """Number of Python functions that ``work`` calls."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
