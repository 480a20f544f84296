"""A state lies in memory after a resume as before: what overlaps still does, and strides, by which operations round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dalsegno as ds
from dalsegno.testing import compare_runs, run_ranks
from support.listeners import Listener
from support.models import Layered
from support.resumed import assert_resumes, stop_after
from support.small import small_trainer

WIDTH = 33  # a square weight: the eigenbasis has its shape


def deep() -> Layered:
    return Layered(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


class Optimizer(torch.optim.Optimizer):
    """Updates each parameter by ``update``, with its state and that of the first parameter of its group."""

    def __init__(self, parameters: Any, **defaults: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                first = group["params"][0]
                self.update(parameter, self.state[parameter], self.state[first], parameter is first, group)

    def update(self, parameter: Tensor, state: Any, first: Any, is_first: bool, group: Any) -> None:
        raise NotImplementedError


class Eigenbasis(Optimizer):
    """As SOAP: the result of ``qr`` is column-major, and a product with it rounds otherwise than with a copy."""

    def update(self, parameter: Tensor, state: Any, first: Any, is_first: bool, group: Any) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if parameter.dim() < 2:
            parameter.sub_(gradient, alpha=group["lr"])
            return
        if not state:
            state["basis"] = torch.eye(len(parameter))
            state["moment"] = torch.zeros_like(parameter)
        state["moment"].lerp_(gradient, 0.3)
        projected = state["basis"].sum(0) @ state["moment"]
        parameter.sub_(gradient * (1 + 100 * projected), alpha=group["lr"])
        state["basis"] = torch.linalg.qr(state["basis"] @ (torch.eye(len(parameter)) + gradient @ gradient.T))[0]


class SharedStep(Optimizer):
    """All parameters have one step counter, which the first advances."""

    def update(self, parameter: Tensor, state: Any, first: Any, is_first: bool, group: Any) -> None:
        if not state:
            state["step"] = torch.zeros(()) if is_first else first["step"]
        if is_first:
            state["step"] += 1
        parameter.sub_(parameter.grad, alpha=group["lr"] / float(state["step"]))


class SharedScales(Optimizer):
    """All parameters have one tensor of scales, and each a view of it."""

    def update(self, parameter: Tensor, state: Any, first: Any, is_first: bool, group: Any) -> None:
        assert parameter.grad is not None
        if not state:
            state["scales"] = torch.ones(4) if is_first else first["scales"]
            state["half"] = state["scales"][1:3]
        state["half"].add_(parameter.grad.abs().mean())
        parameter.sub_(parameter.grad, alpha=group["lr"] / float(state["scales"].sum()))


class TwoNames(Optimizer):
    """A parameter has one moment under two names."""

    def update(self, parameter: Tensor, state: Any, first: Any, is_first: bool, group: Any) -> None:
        if not state:
            state["fast"] = state["slow"] = torch.zeros_like(parameter)
        state["fast"].add_(parameter.grad)
        parameter.sub_(state["slow"], alpha=0.1 * group["lr"])
        state["slow"].mul_(0.9)


class Expanded(Optimizer):
    """A parameter has one number, expanded to its shape."""

    def update(self, parameter: Tensor, state: Any, first: Any, is_first: bool, group: Any) -> None:
        if not state:
            state["scale"] = torch.ones([1] * parameter.dim()).expand(parameter.shape)
        state["scale"][(slice(1),) * parameter.dim()].mul_(0.9)
        parameter.sub_(parameter.grad * state["scale"], alpha=group["lr"])


class SharedRate(Optimizer):
    """Two groups have one rate, a tensor that the first group changes."""

    def __init__(self, parameters: Any) -> None:
        first, *others = parameters
        super().__init__([{"params": [first]}, {"params": others}], rate=torch.tensor(0.01))

    def update(self, parameter: Tensor, state: Any, first: Any, is_first: bool, group: Any) -> None:
        assert parameter.grad is not None
        if group is self.param_groups[0]:
            group["rate"].mul_(0.9)
        parameter.sub_(parameter.grad * group["rate"])


def trainer_with(optimizer: Callable[[Any], torch.optim.Optimizer]) -> Callable[..., ds.Trainer]:
    def build(folder: Path, *callbacks: Any) -> ds.Trainer:
        torch.manual_seed(1)
        model = deep()
        own = {"optimizer": optimizer(model.parameters())}
        return small_trainer(folder, *callbacks, model=model, length=24, max_steps=6, save_steps=9, parts=own)

    return build


@pytest.mark.parametrize("optimizer", [Eigenbasis, SharedStep, SharedScales, TwoNames, Expanded])
def test_an_optimizer_continues_with_the_memory_that_it_had(optimizer: Any, tmp_path: Path) -> None:
    assert_resumes(trainer_with(optimizer), tmp_path, 2, 4)


def test_groups_share_a_rate_again(tmp_path: Path) -> None:
    build = trainer_with(SharedRate)
    build(tmp_path / "whole").train()
    build(tmp_path / "parts", stop_after(3)).train()
    build(tmp_path / "parts").train()
    weights = [row for row in compare_runs(tmp_path / "whole", tmp_path / "parts").rows if row.what == "model"]
    assert [row.difference for row in weights] == [None]


@pytest.mark.parametrize("optimizer", [Eigenbasis, TwoNames, Expanded])
def test_an_optimizers_state_has_its_strides_and_names_again(optimizer: Any, tmp_path: Path) -> None:
    made: list[torch.optim.Optimizer] = []
    loaded: list[tuple[Any, ...]] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(optimizer(parameters))
        return made[-1]

    def described() -> list[tuple[Any, ...]]:
        states = [made[-1].state[each] for group in made[-1].param_groups for each in group["params"]]
        return [
            (kind, each.stride(), [other for other in state if state[other] is each])
            for state in states
            for kind, each in sorted(state.items())
        ]

    build = trainer_with(make)
    build(tmp_path, stop_after(3)).train()
    saved = described()
    build(tmp_path, Listener({"on_train_begin": lambda ctx: loaded.extend(described())}, name="look")).train()
    assert loaded == saved != []


def on_two_ranks(folder: Path) -> None:
    for optimizer in (Eigenbasis, TwoNames, SharedStep):
        build, its = trainer_with(optimizer), folder / optimizer.__name__
        build(its / "whole").train()
        build(its / "parts", stop_after(3)).train()
        build(its / "parts").train()


def test_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path)
    for optimizer in (Eigenbasis, TwoNames, SharedStep):
        comparison = compare_runs(*(tmp_path / optimizer.__name__ / name for name in ("whole", "parts")))
        assert comparison.identical, f"\n{comparison.table()}"


# --- callbacks ----------------------------------------------------------------------------------------------------


class Keeper(ds.Callback):
    """Works on its tensors and arrays after each step, and records a number that depends on how they lie in memory."""

    key = "keeper"

    def __init__(self, held: dict[str, Any], work: Callable[[dict[str, Any]], float]) -> None:
        self._held, self._work = held, work
        self._seen: list[float] = []

    def on_step_end(self, ctx: Any) -> None:
        self._seen.append(float(self._work(self._held)))

    def state_dict(self) -> Any:
        return {"held": self._held, "seen": self._seen}

    def load_state_dict(self, state: Any) -> None:
        self._held, self._seen = state["held"], state["seen"]


def column_major() -> Keeper:
    def work(held: dict[str, Any]) -> float:
        held["vector"] = held["basis"] @ held["vector"]
        return float(held["vector"].sum())

    drawn = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=drawn))[0]
    return Keeper({"basis": basis, "vector": torch.randn(WIDTH, generator=drawn)}, work)


def arrays() -> Keeper:
    def work(held: dict[str, Any]) -> float:
        held["table"] *= 1.01
        held["backwards"] *= 1.01
        return float(held["table"].sum() + held["backwards"].sum() + held["table"].ravel(order="K")[1])

    drawn = np.random.default_rng(1)
    table, backwards = np.asfortranarray(drawn.normal(size=(33, 47))), drawn.normal(size=50)[::-2]
    return Keeper({"table": table, "backwards": backwards}, work)


def one_memory() -> Keeper:
    def work(held: dict[str, Any]) -> float:
        held["one"] += 1
        held["other"] *= 1.5
        held["part"] -= 0.25
        held["array"] += 1
        held["same array"][::2] *= 1.5
        held["expanded"][:1] += 1
        return float(sum(each.sum() for each in held.values()))

    one, array = torch.zeros(4), np.zeros(3)
    expanded = torch.ones(1).expand(5)
    return Keeper(
        {"one": one, "other": one, "part": one[1:3], "array": array, "same array": array, "expanded": expanded}, work
    )


def gradients() -> Keeper:
    def work(held: dict[str, Any]) -> float:
        assert isinstance(held["weight"], nn.Parameter)
        (held["weight"] * held["scale"]).square().sum().backward()
        with torch.no_grad():
            for each in held.values():
                each -= 0.1 * each.grad
                each.grad = None
        return float(held["scale"].detach().sum())

    return Keeper({"weight": nn.Parameter(torch.ones(3)), "scale": torch.ones(3, requires_grad=True)}, work)


@pytest.mark.parametrize("keeper", [column_major, arrays, one_memory, gradients])
def test_a_callback_continues_with_the_memory_that_it_had(keeper: Callable[[], Keeper], tmp_path: Path) -> None:
    assert_resumes(
        lambda folder, *others: small_trainer(folder, keeper(), *others, length=24, max_steps=6, save_steps=9),
        tmp_path,
        2,
        4,
    )
