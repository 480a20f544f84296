"""What holds for every built-in: construct, run, stop mid-way, resume, equal to uninterrupted, fit again, close."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apprise
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.regression import MeanAbsoluteError

import dalsegno as ds
from dalsegno import callbacks
from dalsegno.callback import global_callbacks
from dalsegno.component import Stateful
from dalsegno.testing import TinyRegression, compare_runs, tiny_regression_data
from support.languages import Letters
from support.listeners import Listener
from support.small import same, small_trainer, weights

STEPS = 12

# Those that can only be built with arguments, or do nothing interesting without.
RECIPES: dict[str, Callable[[], ds.Callback]] = {
    "DivergenceDetector": lambda: callbacks.DivergenceDetector(warmup=2, threshold=100.0),
    "JsonLogger": lambda: callbacks.JsonLogger(run="contract"),
    "DefaultMetrics": lambda: callbacks.DefaultMetrics(peak_hardware_flops=1e12),
    "ProgressCallback": lambda: callbacks.ProgressCallback(use_tqdm=False),
    "ProgressCallback with bars": lambda: callbacks.ProgressCallback(use_tqdm=True),
    "InfoCallback": lambda: callbacks.InfoCallback(verbose=True),
    "ComputeNorm": lambda: callbacks.ComputeNorm(per_layer=True),
    "EarlyStopping": lambda: callbacks.EarlyStopping(patience=100),
    "ExpertLoadBalance": lambda: callbacks.ExpertLoadBalance(every=2, router=r"layers\.3$"),
    "GarbageCollection": lambda: callbacks.GarbageCollection(every=2),
    "GradHistogram": lambda: callbacks.GradHistogram(every=2),
    "LearningDynamics": lambda: callbacks.LearningDynamics(every=2),
    "LogOptimizerParamGroup": lambda: callbacks.LogOptimizerParamGroup(["lr", "weight_decay"]),
    "PeakMemory": lambda: callbacks.PeakMemory(do_log=True),
    "ModelEvalMetrics": lambda: callbacks.ModelEvalMetrics(
        {"error": MeanAbsoluteError()}, select=lambda outputs, batch: (batch["y"], batch["y"])
    ),
    "Notify": lambda: callbacks.Notify("json://127.0.0.1:9/"),
    "ScaleLoss": lambda: callbacks.ScaleLoss(1.0),
    "SkipSamples": lambda: callbacks.SkipSamples(0),
    "ScopedFlags": lambda: callbacks.ScopedFlags({"cudnn.benchmark": True}),
    "TextgenCallback": lambda: callbacks.TextgenCallback(
        ["the cat", "a"], generation_config={"do_sample": True}, generation_steps=4, max_new_tokens=3
    ),
}


class Model(TinyRegression):
    """One that all of them can listen to: given ids alone, it has logits for what follows."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if y is not None:
            return super().forward(x, y)
        letters = len(Letters.alphabet)
        logits: Tensor = self.layers(nn.functional.one_hot(x % 8, 8).float()) * torch.arange(letters)
        return logits


every_builtin = pytest.mark.parametrize("name", sorted({*callbacks.__all__, *RECIPES}))


def build(name: str) -> ds.Callback:
    recipe = RECIPES.get(name) or getattr(callbacks, name)
    callback = recipe()
    assert isinstance(callback, ds.Callback)
    return callback


def trainer(output_dir: Path, *own: ds.Callback, max_steps: int = STEPS, schedule: str = "linear") -> ds.Trainer:
    torch.manual_seed(0)
    return small_trainer(
        output_dir,
        *own,
        model=Model(),
        parts={"eval_dataset": tiny_regression_data(6, seed=1), "processing_class": Letters()},
        max_steps=max_steps,
        lr_scheduler_type=schedule,
        logging_steps=2,
        eval_steps=3,
        save_steps=4,
    )


def stop_after(step: int) -> ds.Callback:
    def stop(ctx: Any) -> None:
        if ctx.step == step:
            ctx.control.stop("mid-way")

    return Listener({"on_step_end": stop}, name="stopper")


def open_files(folder: Path) -> list[str]:
    """What this process holds open in there."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except FileNotFoundError:  # the one that listed them
            continue
    return [link for link in links if link.startswith(str(folder))]


def pooled() -> set[Any]:
    """Threads that apprise keeps for all of a process's life."""
    return set(getattr(apprise.apprise._shared_executor, "_threads", ()))


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """No file stays open, no thread alive, no callback registered."""
    before = set(threading.enumerate())
    yield
    assert open_files(tmp_path) == []
    assert set(threading.enumerate()) - before - pooled() == set()
    assert global_callbacks() == []


@every_builtin
def test_it_is_a_callback_under_its_own_name(name: str) -> None:
    callback = build(name)
    assert callback.key == name.split()[0]
    assert callback.__doc__
    assert callback.__doc__ != ds.Callback.__doc__


@every_builtin
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, name: str) -> None:
    trainer(tmp_path / "whole", build(name)).train()
    for step in (1, 5, 6):
        assert trainer(tmp_path / "parts", build(name), stop_after(step)).train().global_step == step
    assert trainer(tmp_path / "parts", build(name)).train().global_step == STEPS
    comparison = compare_runs(tmp_path / "whole", tmp_path / "parts")
    assert comparison.identical, f"\n{comparison.table()}"


@every_builtin
def test_it_leaves_the_training_alone(tmp_path: Path, name: str) -> None:
    """The same weights and the same random numbers as without it."""

    def outcome(output_dir: Path, *own: ds.Callback) -> list[torch.Tensor]:
        run = trainer(output_dir, *own)
        run.train()
        return [*run.model.state_dict().values(), torch.rand(4)]

    with_it, without = outcome(tmp_path / "with", build(name)), outcome(tmp_path / "without")
    assert all(torch.equal(mine, yours) for mine, yours in zip(with_it, without, strict=True))


@every_builtin
def test_a_second_fit_goes_on(tmp_path: Path, name: str) -> None:
    """The same trainer and the same callback, with more steps to do: as if there had been one fit."""
    twice = trainer(tmp_path / "twice", build(name), max_steps=6, schedule="constant")
    assert twice.train().global_step == 6
    twice.args.max_steps = STEPS
    assert twice.train().global_step == STEPS
    assert twice.train().global_step == STEPS  # nothing to do, and nothing done
    once = trainer(tmp_path / "once", build(name), schedule="constant")
    once.train()
    assert same(weights(once), weights(twice))


@every_builtin
def test_it_survives_an_exception_in_the_run(tmp_path: Path, name: str) -> None:
    def fail(ctx: Any) -> None:
        if ctx.step == 5:
            raise RuntimeError("mid-way")

    callback = build(name)
    with pytest.raises(RuntimeError, match="mid-way"):
        trainer(tmp_path / "parts", callback, Listener({"on_step_end": fail})).train()
    assert open_files(tmp_path) == []
    trainer(tmp_path / "parts", build(name)).train()
    trainer(tmp_path / "whole", build(name)).train()
    comparison = compare_runs(tmp_path / "whole", tmp_path / "parts")
    assert comparison.identical, f"\n{comparison.table()}"


@every_builtin
def test_its_state_is_its_own_whole_story(tmp_path: Path, name: str) -> None:
    """Taken, given to a new one, and taken again: the same."""
    callback = build(name)
    trainer(tmp_path, callback, max_steps=6).train()
    if isinstance(callback, Stateful):
        other = build(name)
        assert isinstance(other, Stateful)
        other.load_state_dict(callback.state_dict())
        assert other.state_dict() == callback.state_dict()
