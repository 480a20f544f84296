"""What holds for every built-in: construct, run, stop mid-way, resume, equal to uninterrupted, fit again, close."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import apprise
import pytest
import torch

import dalsegno as ds
from dalsegno.events.callback import global_callbacks
from dalsegno.stateful.component import Stateful
from dalsegno.testing import compare_runs, tiny_regression_data
from support.builtins import NAMES, RECIPES, Model, build
from support.languages import Letters
from support.listeners import Listener
from support.small import same, small_trainer, weights

STEPS = 12

every_builtin = pytest.mark.parametrize("name", sorted({*NAMES, *RECIPES}))


def trainer(output_dir: Path, *own: ds.Callback, max_steps: int = STEPS, schedule: str = "linear") -> ds.Trainer:
    torch.manual_seed(0)
    return small_trainer(
        output_dir,
        *own,
        model=Model(),
        parts={"eval_dataset": tiny_regression_data(6, seed=1), "processing_class": Letters()},
        max_steps=max_steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of each built-in, a run that nothing interrupts."""

    @cache
    def output_dir(name: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        trainer(folder, build(name)).train()
        assert open_files(folder) == []
        return folder

    return output_dir


def outcome(output_dir: Path, *own: ds.Callback) -> list[torch.Tensor]:
    """The weights, and the next random numbers."""
    run = trainer(output_dir, *own)
    run.train()
    return [*run.model.state_dict().values(), torch.rand(4)]


@pytest.fixture(scope="module")
def outcome_without(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    return outcome(tmp_path_factory.mktemp("without"))


@every_builtin
def test_it_is_a_callback_under_its_own_name(name: str) -> None:
    callback = build(name)
    assert callback.key == name.split()[0]
    assert callback.__doc__
    assert callback.__doc__ != ds.Callback.__doc__


@every_builtin
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, name: str, whole: Callable[[str], Path]) -> None:
    for step in (1, 5, 6):
        assert trainer(tmp_path / "parts", build(name), stop_after(step)).train().global_step == step
    assert trainer(tmp_path / "parts", build(name)).train().global_step == STEPS
    comparison = compare_runs(whole(name), tmp_path / "parts")
    assert comparison.identical, f"\n{comparison.table()}"


@every_builtin
def test_it_leaves_the_training_alone(tmp_path: Path, name: str, outcome_without: list[torch.Tensor]) -> None:
    """The same weights and the same random numbers as without it."""
    with_it = outcome(tmp_path, build(name))
    assert all(torch.equal(mine, yours) for mine, yours in zip(with_it, outcome_without, strict=True))


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
def test_it_can_be_evaluated_with_before_and_after(tmp_path: Path, name: str) -> None:
    """Also by a program that finds the run finished: it measures what the one that trained it does."""
    first = trainer(tmp_path, build(name), max_steps=4)
    assert first.evaluate()["eval_loss"] > 0
    first.train()
    again = trainer(tmp_path, build(name), max_steps=4)
    again.train()
    assert again.evaluate()["eval_loss"] == first.evaluate()["eval_loss"]


@every_builtin
def test_it_survives_an_exception_in_the_run(tmp_path: Path, name: str, whole: Callable[[str], Path]) -> None:
    def fail(ctx: Any) -> None:
        if ctx.step == 5:
            raise RuntimeError("mid-way")

    callback = build(name)
    with pytest.raises(RuntimeError, match="mid-way"):
        trainer(tmp_path / "parts", callback, Listener({"on_step_end": fail})).train()
    assert open_files(tmp_path) == []
    trainer(tmp_path / "parts", build(name)).train()
    comparison = compare_runs(whole(name), tmp_path / "parts")
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
