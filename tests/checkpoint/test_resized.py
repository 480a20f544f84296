"""Observers of quantization-aware training, whose buffers grow from nothing, resume."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dalsegno as ds
from dalsegno.errors import StateMismatch
from dalsegno.testing import compare_runs, run_ranks
from support.models import Layered
from support.resumed import assert_resumes, stop_after
from support.small import small_trainer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.ao.quantization as quantization

pytestmark = pytest.mark.filterwarnings("ignore")  # torch has announced that these move to another package


class Observed(nn.Module):
    """The loss depends on what the observer has seen."""

    def __init__(self, observer: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.observer = nn.Linear(8, 5), nn.Linear(5, 1), observer

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.observer(torch.tanh(self.first(x)))
        lowest = getattr(self.observer, "activation_post_process", self.observer).min_val
        return nn.functional.mse_loss(self.second(hidden), y) + 1e-3 * lowest.sum() * hidden.mean()


class QuantizationAware(Layered):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 1))
        self.layers.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.prepare_qat(self.layers.train(), inplace=True)


def fake_quantize() -> nn.Module:
    observer = quantization.MovingAveragePerChannelMinMaxObserver
    return quantization.FakeQuantize(
        observer, -128, 127, dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=1
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ranges": lambda: Observed(quantization.PerChannelMinMaxObserver(ch_axis=1)),
    "histogram": lambda: Observed(quantization.HistogramObserver()),
    "scales": lambda: Observed(fake_quantize()),
    "whole model": QuantizationAware,
}


def trainer_of(model: Callable[[], nn.Module]) -> Callable[..., ds.Trainer]:
    def build(folder: Path, *callbacks: Any) -> ds.Trainer:
        torch.manual_seed(0)
        return small_trainer(folder, *callbacks, model=model(), length=24, max_steps=6, save_steps=9)

    return build


@pytest.mark.parametrize("name", MODELS)
def test_an_observer_continues_with_what_it_has_seen(name: str, tmp_path: Path) -> None:
    assert_resumes(trainer_of(MODELS[name]), tmp_path, 2, 4)


def on_two_ranks(folder: Path) -> None:
    build = trainer_of(QuantizationAware)
    build(folder / "whole").train()
    build(folder / "parts", stop_after(2)).train()
    build(folder / "parts").train()


def test_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path)
    comparison = compare_runs(tmp_path / "whole", tmp_path / "parts")
    assert comparison.identical, f"\n{comparison.table()}"


class Table(nn.Module):
    """A buffer of a given length, which a load does not resize."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.register_buffer("table", torch.zeros(length))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layer(x), y)


def test_a_buffer_that_its_module_does_not_resize_is_refused(tmp_path: Path) -> None:
    trainer_of(lambda: Table(3))(tmp_path, stop_after(2)).train()
    with pytest.raises(StateMismatch, match=r"table: saved as \[3\] float32, here \[0\] float32"):
        trainer_of(lambda: Table(0))(tmp_path).train()
