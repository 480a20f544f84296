"""An optimizer that is built with its parameters in another order finds its state by name, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dalsegno as ds
from dalsegno.testing import tiny_regression_data
from support.models import Line
from support.resumed import stop_after
from support.small import small_trainer

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class MomentumOfGroups(torch.optim.Optimizer):
    """Keeps its momentum by position, in a list of each group."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.003, "momentum": []})

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        loss = closure()
        for group in self.param_groups:
            group["momentum"] = group["momentum"] or [torch.zeros_like(each) for each in group["params"]]
            for parameter, momentum in zip(group["params"], group["momentum"], strict=True):
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.data.add_(momentum, alpha=-group["lr"])
        return loss


class Head:
    """Parameters outside of any module."""

    def __init__(self) -> None:
        self.scales = [nn.Parameter(torch.full((), 1.0 + number)) for number in range(3)]

    def parameters(self) -> list[nn.Parameter]:
        return self.scales

    def __call__(self, y: Tensor) -> Tensor:
        return y * self.scales[0] + self.scales[1] * y.square() + self.scales[2]

    def state_dict(self) -> dict[str, Any]:
        return {"scales": self.scales}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for own, saved in zip(self.scales, state["scales"], strict=True):
            own.data.copy_(saved)


class Stack(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(1, 1) for _ in range(3)))
        for number, layer in enumerate(self):
            nn.init.constant_(layer.weight, 1.0 + number)


def own_loop(output_dir: Path, make: Make, head: Any, steps: int, *, rotated: bool = False) -> Tensor:
    """The parameters of model and head after ``steps``, in one row."""
    torch.manual_seed(0)
    model, head = Line(), head()
    own = [*head.parameters()]
    parameters = [*model.parameters(), *own]
    optimizer = make([*own[2:], *own[:2], *model.parameters()] if rotated else parameters)
    args = ds.TrainingArguments(output_dir, max_steps=steps, save_steps=100, logging_steps=0, use_cpu=True)
    loader = DataLoader(tiny_regression_data(48), batch_size=4)
    with ds.Run(args, model=model, optimizer=optimizer, loader=loader, state={"head": head}) as run:
        for batch in run.batches():

            def closure(batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(head(model.layer(batch["x"])), batch["y"])
                loss.backward()
                return loss

            run.step_end(loss=optimizer.step(closure))
    return torch.cat([each.detach().flatten() for each in parameters])


@pytest.mark.parametrize("head", [Stack, Head])
def test_what_state_contains_is_found_by_name(tmp_path: Path, head: Any) -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01)

    whole = own_loop(tmp_path / "whole", make, head, 8)
    own_loop(tmp_path / "parts", make, head, 4)
    assert torch.equal(own_loop(tmp_path / "parts", make, head, 8, rotated=True), whole)


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2), "state of layer.weight: d is"),
        (MomentumOfGroups, r"groups\[0\]\['momentum'\] is"),
    ],
    ids=["LBFGS", "lists"],
)
def test_state_by_position_is_refused_in_another_order(tmp_path: Path, make: Make, place: str) -> None:
    whole = own_loop(tmp_path / "whole", make, Stack, 8)
    own_loop(tmp_path / "parts", make, Stack, 4)
    with pytest.raises(ds.StateMismatch, match=f"number 0 was layer.weight, here it is head/1.weight. {place}"):
        own_loop(tmp_path / "parts", make, Stack, 8, rotated=True)
    assert torch.equal(own_loop(tmp_path / "parts", make, Stack, 8), whole)


def trainer(output_dir: Path, *callbacks: ds.Callback, backwards: bool = False) -> ds.Trainer:
    model = Line()
    parameters = [*model.parameters()]
    optimizer = torch.optim.Adam(parameters[::-1] if backwards else parameters, lr=0.01)
    return small_trainer(output_dir, *callbacks, model=model, parts={"optimizer": optimizer}, max_steps=4)


def test_a_trainer_that_adds_squares_in_another_order_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path, stop_after(2)).train()
    assert trainer(tmp_path, stop_after(3)).train().global_step == 3
    assert "order of parameters" not in caplog.text
    trainer(tmp_path, backwards=True).train()
    assert "order of parameters: saved layer.weight … layer.bias" in caplog.text
