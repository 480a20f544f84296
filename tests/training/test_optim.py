"""Any schedule and any optimizer of torch's: the rates of a plain loop, and a resumed run continues with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, RMSprop, lr_scheduler

import dalsegno as ds
from dalsegno.errors import ConfigurationError
from dalsegno.testing import TinyLanguageModel, TinyRegression, tiny_regression_data
from support.listeners import Listener
from support.models import Line
from support.resumed import assert_resumes
from support.small import small_trainer

Schedule = Callable[[Optimizer], Any]

SCHEDULES: dict[str, Schedule] = {
    "multi-step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 5], gamma=0.5),  # milestones: a Counter
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=11),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
    "two of them": lambda optimizer: [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
        lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    ],
}


def rates_of_a_plain_loop(schedule: Schedule, steps: int) -> list[float]:
    optimizer = SGD(nn.Linear(8, 1).parameters(), lr=0.01)
    built = schedule(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for each in built if isinstance(built, list) else [built]:
            each.step()
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule(tmp_path: Path, name: str) -> None:
    """The rates are those of a plain loop, and a resumed run continues with them."""
    rates: dict[int, float] = {}
    built: list[Any] = []

    def build(output_dir: Path, *more: ds.Callback) -> ds.Trainer:
        torch.manual_seed(0)
        model = TinyRegression()
        optimizer = SGD(model.parameters(), lr=0.01)
        built.append(SCHEDULES[name](optimizer))
        parts = {"optimizer": optimizer, "lr_scheduler": built[-1]}
        note = Listener({"on_step_end": lambda ctx: rates.update({ctx.step: ctx.lr})}, name="note")
        return small_trainer(output_dir, note, *more, model=model, parts=parts, max_steps=10, save_steps=100)

    assert_resumes(build, tmp_path, 2, 7)
    assert [rates[step] for step in range(1, 11)] == rates_of_a_plain_loop(SCHEDULES[name], 10)
    if name == "multi-step":
        assert built[-1].milestones == Counter({2: 2, 5: 1})
        assert isinstance(built[-1].milestones, Counter)


def test_a_plateau_is_seen_at_evaluations_and_after_a_resume(tmp_path: Path) -> None:
    rates: dict[int, float] = {}

    def build(output_dir: Path, *more: ds.Callback) -> ds.Trainer:
        model = Line()
        optimizer = SGD(model.parameters(), lr=0.01)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs")
        parts = {"optimizer": optimizer, "lr_scheduler": plateau, "eval_dataset": tiny_regression_data(8, seed=1)}
        note = Listener({"on_step_end": lambda ctx: rates.update({ctx.step: ctx.lr})}, name="note")
        settings = {"max_steps": 8, "eval_steps": 2, "save_steps": 100}
        return small_trainer(output_dir, note, *more, model=model, parts=parts, **settings)

    assert_resumes(build, tmp_path, 3, 4)
    assert [rates[step] for step in range(1, 9)] == [0.01] * 4 + [0.005] * 2 + [0.0025] * 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_steps": 2}, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
        ({"warmup_ratio": 1 / 3}, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
        ({"warmup_steps": 2, "warmup_ratio": 0.5}, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
        ({"lr_scheduler_type": "cosine", "warmup_steps": 2}, [0.0, 0.5, 1.0, 0.8535534, 0.5, 0.1464466]),
        ({"lr_scheduler_type": "constant", "warmup_steps": 2}, [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"min_lr": 0.002, "warmup_steps": 2}, [0.0, 0.5, 1.0, 0.8, 0.6, 0.4]),
        ({"lr_scheduler_type": "wsd", "decay_ratio": 0.5, "warmup_steps": 2}, [0.0, 0.5, 1.0, 1.0, 2 / 3, 1 / 3]),
        ({"lr_scheduler_type": "wsd", "decay_ratio": 1.0, "warmup_steps": 2}, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
    ],
)
def test_schedules_by_name(tmp_path: Path, settings: dict[str, Any], expected: list[float]) -> None:
    rates: list[float] = []
    note = Listener({"on_step_end": lambda ctx: rates.append(ctx.lr / 0.01)})
    small_trainer(tmp_path, note, max_steps=6, **settings).train()
    assert rates == pytest.approx(expected)


RESTARTS, POWER, WSD = "cosine_with_restarts", "polynomial", "warmup_stable_decay"
OF_TRANSFORMERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cosine": ("cosine_with_min_lr", {"min_lr": 0.001}, {"lr_scheduler_type": "cosine", "min_lr": 0.001}),
    "cosine_with_min_lr": ("cosine_with_min_lr", {"min_lr": 0.001}, {"min_lr": 0.001}),
    "restarts": (RESTARTS, {"num_cycles": 3}, {"lr_scheduler_kwargs": {"num_cycles": 3}}),
    "once": (RESTARTS, {}, {}),
    "power": (POWER, {"power": 2.0, "lr_end": 0.001}, {"lr_scheduler_kwargs": {"power": 2.0}, "min_lr": 0.001}),
    "power 1": (POWER, {"lr_end": 0.0}, {}),
    "inverse root": ("inverse_sqrt", {}, {}),
    "inverse root, faster": ("inverse_sqrt", {"timescale": 3}, {"lr_scheduler_kwargs": {"timescale": 3}}),
    "constant": ("constant_with_warmup", {}, {}),
    "wsd": (
        WSD,
        {"num_decay_steps": 10, "min_lr_ratio": 0.1, "decay_type": "linear"},
        {"lr_scheduler_type": "wsd", "decay_ratio": 0.25, "min_lr": 0.001},
    ),
    "wsd, a cosine": (WSD, {"num_decay_steps": 4}, {"decay_ratio": 0.1}),
    "wsd, a root": (
        WSD,
        {"num_decay_steps": 7, "decay_type": "1-sqrt"},
        {"lr_scheduler_kwargs": {"num_decay_steps": 7, "decay_type": "1-sqrt"}},
    ),
}
"""Name and arguments there; settings here, if it is not the same name alone."""


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_schedules_equal_those_of_transformers_and_resume(tmp_path: Path, name: str) -> None:
    get_scheduler = pytest.importorskip("transformers").get_scheduler
    kind, theirs, ours = OF_TRANSFORMERS[name]
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.01)
    schedule = get_scheduler(kind, optimizer, 5, 40, theirs)
    rates: dict[int, float] = {}

    def build(output_dir: Path, *more: ds.Callback) -> ds.Trainer:
        note = Listener({"on_step_end": lambda ctx: rates.update({ctx.step: ctx.lr})})
        settings = {"max_steps": 40, "warmup_steps": 5, "save_steps": 100, "lr_scheduler_type": kind, **ours}
        return small_trainer(output_dir, note, *more, **settings)

    assert_resumes(build, tmp_path, 20)
    expected = []
    for _ in range(40):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    seen = [rates[step] for step in range(1, 41)]
    assert seen[5:] == pytest.approx(expected[5:], abs=1e-12)  # theirs may warm up from the floor, ours from zero


def test_a_schedule_that_needs_an_end_is_refused_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'linear' needs the last step, and the data has no length"):
        small_trainer(tmp_path, parts={"train_dataset": iter([])})
    with pytest.raises(ConfigurationError, match="warmup_ratio needs the last step"):
        small_trainer(tmp_path, parts={"train_dataset": iter([])}, lr_scheduler_type="constant", warmup_ratio=0.1)


def test_a_scheduler_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    other = SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    with pytest.raises(ConfigurationError, match="lr_scheduler: it is built on another optimizer"):
        small_trainer(tmp_path, parts={"lr_scheduler": lr_scheduler.StepLR(other, 1)})


# --- optimizers, with weights that are tied ---------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda parameters: SGD(parameters, lr=0.1),
    "SGD with momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda parameters: Adam(parameters, lr=0.01, amsgrad=True),
    "Adagrad": lambda parameters: Adagrad(parameters, lr=0.01),
    "RMSprop": lambda parameters: RMSprop(parameters, lr=0.01, momentum=0.5, centered=True),
}


class Lines:
    """Sixteen bytes each, and the same shifted by one."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = torch.arange(index, index + 17) % 31
        return {"input_ids": text[:-1], "labels": text[1:]}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_with_tied_weights(tmp_path: Path, name: str) -> None:
    def build(output_dir: Path, *more: ds.Callback) -> ds.Trainer:
        torch.manual_seed(0)
        model = TinyLanguageModel(width=8, depth=1, heads=2, context=16, vocabulary=31)
        parts = {"optimizer": OPTIMIZERS[name](model.parameters()), "train_dataset": Lines()}
        return small_trainer(output_dir, *more, model=model, parts=parts, max_steps=8, save_steps=100)

    last = assert_resumes(build, tmp_path, 3)
    assert last.model.head.weight is last.model.tokens.weight
    assert last.state.num_input_tokens_seen == 8 * 4 * 16
