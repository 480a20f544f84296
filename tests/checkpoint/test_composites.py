"""Sparse tensors, and torch's own quantized ones, are saved by their values, and come back bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoint.test_codec import through_json
from dalsegno.checkpoint import CheckpointManager, ModelState, composites
from dalsegno.cli import main
from dalsegno.distributed.sharded_tensors import are_finite
from dalsegno.errors import StateMismatch
from support.small import small_trainer

DENSE = torch.tensor([[0.0, 1.5, 0.0, -0.0], [2.0, 0.0, float("nan"), 0.0]])
SCALES, ZEROS = torch.tensor([0.5, 0.25]), torch.tensor([1, 2])
FORMS = {
    "coalesced": DENSE.to_sparse(),
    "not coalesced": torch.sparse_coo_tensor([[0, 0, 1], [0, 0, 2]], torch.tensor([1.0, 2.0, 3.0]), (2, 3)),
    "hybrid": DENSE.to_sparse(1),
    "empty": torch.sparse_coo_tensor(size=(3, 0)),
    "csr": DENSE.to_sparse_csr(),
    "short indices": torch.sparse_csr_tensor(torch.tensor([0, 1, 1]).int(), torch.tensor([3]).int(), [2.0], (2, 4)),
    "csc": DENSE.to_sparse_csc(),
    "bsr": DENSE.to_sparse_bsr((1, 2)),
    "bsc": DENSE.to_sparse_bsc((1, 2)),
    "qint8": torch.quantize_per_tensor(DENSE.nan_to_num(), 0.1, 3, torch.qint8),
    "a view": torch.quantize_per_tensor(DENSE.nan_to_num(), 0.1, 3, torch.quint8).t()[1:],
    "qint32": torch.quantize_per_tensor(DENSE.nan_to_num(), 1e-3, 0, torch.qint32),
    "per channel": torch.quantize_per_channel(DENSE.nan_to_num(), SCALES, ZEROS, 0, torch.qint8),
    "quint4x2": torch.quantize_per_channel(DENSE.nan_to_num(), SCALES, ZEROS.float(), 0, torch.quint4x2),
    "quint2x4": torch.quantize_per_channel(DENSE.nan_to_num(), SCALES, ZEROS.float(), 0, torch.quint2x4),
}


def bits(tensor: torch.Tensor) -> Any:
    """Everything that a composite tensor consists of."""
    kind, values = composites.take_apart(tensor)
    plain = {
        name: each.contiguous().view(-1).view(torch.uint8).tolist() if isinstance(each, torch.Tensor) else each
        for name, each in values.items()
    }
    return kind, list(tensor.shape), tensor.dtype, plain


@pytest.mark.parametrize("form", FORMS)
def test_it_comes_back_bit_by_bit(form: str) -> None:
    decoded = through_json({"held": FORMS[form]})["held"]
    assert bits(decoded) == bits(FORMS[form])


class Graph(nn.Module):
    """A model with buffers that training changes."""

    def __init__(self, edges: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(8, 1)
        self.register_buffer("edges", edges)
        self.register_buffer("table", torch.quantize_per_tensor(torch.zeros(2, 2), 0.5, 0, torch.qint8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.training:
            grown = torch.eye(3) * self.line.weight.detach()[0, :3] + self.edges.to_dense()
            self.edges = grown.to_sparse(layout=self.edges.layout)
            self.table = torch.quantize_per_tensor(grown[:2, :2], float(grown.abs().max()) / 127, 0, torch.qint8)
        return nn.functional.mse_loss(self.line(x), y)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_a_run_resumes_bit_by_bit(tmp_path: Path, layout: torch.layout, capsys: pytest.CaptureFixture[str]) -> None:
    """The live buffer has fewer elements than the saved one."""

    def train(folder: str, steps: int) -> list[Any]:
        model = Graph(torch.zeros(3, 3).to_sparse(layout=layout))
        settings = {"lr_scheduler_type": "constant", "save_steps": 2}
        small_trainer(tmp_path / folder, model=model, max_steps=steps, **settings).train()
        return [bits(model.edges), bits(model.table), model.line.weight.tolist()]

    whole = train("whole", 4)
    train("run", 2)
    assert train("run", 4) == whole
    assert main(["checkpoints", "show", str(tmp_path / "run"), "--json"]) == 0
    assert "tensor qint8 [2, 2]" in capsys.readouterr().out


class Sparse(nn.Module):
    """A model with a frozen parameter of each layout."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(8, 1)
        held = {"coo": DENSE.to_sparse(), "empty": torch.zeros(2, 2).to_sparse()}
        held |= {"csr": DENSE.to_sparse_csr(), "csc": DENSE.to_sparse_csc()}
        held |= {"bsr": DENSE.to_sparse_bsr((1, 2)), "bsc": DENSE.to_sparse_bsc((1, 2))}
        for name, each in held.items():
            values = each._values() if each.layout == torch.sparse_coo else each.values()
            values.nan_to_num_().mul_(sign)
            self.register_parameter(name, nn.Parameter(each, requires_grad=False))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.line(x), y)


def test_frozen_parameters_are_checked_for_nan_and_resumed(tmp_path: Path) -> None:
    saved, other = Sparse(1.0), Sparse(2.0)
    small_trainer(tmp_path, model=saved, max_steps=2, save_steps=2).train()
    small_trainer(tmp_path, model=other, max_steps=3, save_steps=2).train()
    held = [[bits(each) for each in model.parameters(recurse=False)] for model in (saved, other)]
    assert len(held[0]) == 6
    assert held[0] == held[1]
    assert are_finite(other)
    with torch.no_grad():
        other.csc.values().fill_(float("nan"))
    assert not are_finite(other)


def test_quantized_modules(tmp_path: Path) -> None:
    """They save their weight in a tuple, and build it anew from that."""

    def quantized(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)

    source, target, inputs = quantized(0), quantized(1), torch.linspace(-1, 1, 8).view(2, 4)
    assert not torch.equal(source(inputs), target(inputs))
    CheckpointManager(tmp_path).save(1, [ModelState(source)], [])
    checkpoint = CheckpointManager(tmp_path).find()
    assert checkpoint is not None
    CheckpointManager(tmp_path).load(checkpoint, [ModelState(target)], [])
    assert torch.equal(source(inputs), target(inputs))


@pytest.mark.parametrize(
    ("saved", "here", "difference"),
    [
        ("csr", "csc", r"held: saved as sparse_csr \[2, 4\] float32 .*, here sparse_csc"),
        ("csr", "not coalesced", r"held: saved as sparse_csr \[2, 4\] float32 .*, here sparse_coo \[2, 3\]"),
        ("qint8", "qint32", r"held: saved as qint8 \[2, 4\] qint8 per_tensor_affine, here qint32"),
        ("qint8", "per channel", r"qint8 per_tensor_affine, here qint8 \[2, 4\] qint8 per_channel_affine"),
        ("coalesced", "hybrid", r"with 2 sparse dimensions, here sparse_coo \[2, 4\] float32 with 1 sparse dimensions"),
        ("csr", "short indices", r"indices of int64, here sparse_csr .* indices of int32"),
    ],
)
def test_another_form_is_refused_before_anything_changes(
    tmp_path: Path, saved: str, here: str, difference: str
) -> None:
    def holder(held: torch.Tensor) -> nn.Module:
        model = nn.Linear(1, 1)
        model.register_buffer("held", held)
        return model

    CheckpointManager(tmp_path).save(1, [ModelState(holder(FORMS[saved]))], [])
    checkpoint = CheckpointManager(tmp_path).find()
    assert checkpoint is not None
    target = holder(FORMS[here].clone())
    before = bits(target.held), target.weight.tolist()
    with pytest.raises(StateMismatch, match=difference):
        CheckpointManager(tmp_path).load(checkpoint, [ModelState(target)], [])
    assert (bits(target.held), target.weight.tolist()) == before
