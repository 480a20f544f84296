"""compare_runs: the states of two runs, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dalsegno as ds
from dalsegno.testing import compare_runs
from support.small import small_trainer


class Keeper(ds.Callback):
    """Its state is a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor = state["tensor"]


def difference_of(tensor: torch.Tensor, other: torch.Tensor, folder: Path) -> str | None:
    """The difference between the states of two runs, one with each of the tensors; None if they are identical."""
    paths = [folder / "one", folder / "other"]
    for path, each in zip(paths, (tensor, other), strict=True):
        small_trainer(path, Keeper(each), max_steps=2, save_steps=2).train()
    rows = compare_runs(*paths).rows
    return next((row.difference for row in rows if row.difference), None)


def quantized(scale: float) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.zeros(4), scale, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:.*(quantized|Sparse).*:UserWarning")
@pytest.mark.parametrize(
    ("tensor", "other", "where"),
    [
        (lambda: torch.eye(3).to_sparse(), lambda: 2 * torch.eye(3).to_sparse(), "tensor[1].values: 3 of 3 elements"),
        (lambda: torch.eye(3).to_sparse(), lambda: torch.eye(3), "torch.sparse_coo of torch.float32 (3, 3) and torch."),
        (lambda: torch.eye(3), lambda: torch.eye(3).to_sparse_csr(), "(3, 3) and torch.sparse_csr of torch.float32"),
        (lambda: quantized(0.5), lambda: quantized(0.25), "tensor[1].scale: 0.5 and 0.25"),
    ],
    ids=["sparse", "one is sparse", "the other is sparse", "quantized"],
)
def test_sparse_and_quantized_tensors_are_compared_by_their_values(
    tensor: Callable[[], torch.Tensor], other: Callable[[], torch.Tensor], where: str, tmp_path: Path
) -> None:
    assert difference_of(tensor(), tensor(), tmp_path / "equal") is None
    assert where in (difference_of(tensor(), other(), tmp_path / "different") or "")
