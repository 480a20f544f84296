"""What holds for every built-in: construct, run, stop mid-way, resume, equal to uninterrupted, fit again, close."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@pytest.fixture(scope="module", params=sorted({*NAMES, *RECIPES}))
def name(request: pytest.FixtureRequest) -> str:
    """Of each built-in in turn: all that holds for one is shown before the next."""
    return str(request.param)


def trainer(output_dir: Path, *own: ds.Callback, max_steps: int = STEPS) -> ds.Trainer:
    """Its learning rate rises for eight steps, however many there are: a run of two halves has that of a whole one."""
    torch.manual_seed(0)
    return small_trainer(
        output_dir,
        *own,
        model=Model(),
        parts={"eval_dataset": tiny_regression_data(6, seed=1), "processing_class": Letters()},
        max_steps=max_steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        lr_scheduler_type="constant",
        warmup_steps=8,
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


@contextmanager
def leaving_nothing(folder: Path) -> Iterator[None]:
    """No file stays open, no thread alive, no callback registered."""
    before = set(threading.enumerate())
    yield
    assert open_files(folder) == []
    assert set(threading.enumerate()) - before - pooled() == set()
    assert global_callbacks() == []


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    with leaving_nothing(tmp_path):
        yield


@dataclass(frozen=True, slots=True)
class Whole:
    """A run that nothing interrupted."""

    folder: Path
    callbacks: tuple[ds.Callback, ...]
    weights: dict[str, torch.Tensor]
    next_numbers: torch.Tensor
    """The next that the run would have drawn."""


def run_whole(folder: Path, *own: ds.Callback) -> Whole:
    run = trainer(folder, *own)
    with leaving_nothing(folder):
        run.train()
    return Whole(folder, own, weights(run), torch.rand(4))


@pytest.fixture(scope="module")
def whole(name: str, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return run_whole(tmp_path_factory.mktemp("whole"), build(name))


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return run_whole(tmp_path_factory.mktemp("without"))


def test_it_is_a_callback_under_its_own_name(name: str) -> None:
    callback = build(name)
    assert callback.key == name.split()[0]
    assert callback.__doc__
    assert callback.__doc__ != ds.Callback.__doc__


def test_stopped_failed_and_resumed_equals_uninterrupted(tmp_path: Path, name: str, whole: Whole) -> None:
    """The run that fails leaves nothing open, either, and is resumed from its newest checkpoint."""

    def fail(ctx: Any) -> None:
        if ctx.step == 6:
            raise RuntimeError("mid-way")

    for step in (1, 5):
        assert trainer(tmp_path / "parts", build(name), stop_after(step)).train().global_step == step
    callback = build(name)  # lives on: what it has open is not closed by its end
    with pytest.raises(RuntimeError, match="mid-way"):
        trainer(tmp_path / "parts", callback, Listener({"on_step_end": fail})).train()
    assert open_files(tmp_path) == []
    assert trainer(tmp_path / "parts", build(name)).train().global_step == STEPS
    comparison = compare_runs(whole.folder, tmp_path / "parts")
    assert comparison.identical, f"\n{comparison.table()}"


def test_it_leaves_the_training_alone(whole: Whole, without: Whole) -> None:
    """The same weights and the same random numbers as without it."""
    assert same(whole.weights, without.weights)
    assert torch.equal(whole.next_numbers, without.next_numbers)


def test_a_second_fit_goes_on_and_evaluations_change_nothing(tmp_path: Path, name: str, whole: Whole) -> None:
    """The same trainer and the same callback, evaluated with and then with more steps to do: as if there had been one
    fit. A program that finds the run finished measures what the one that trained it does."""
    twice = trainer(tmp_path / "twice", build(name), max_steps=6)
    assert twice.evaluate()["eval_loss"] > 0
    assert twice.train().global_step == 6
    twice.args.max_steps = STEPS
    assert twice.train().global_step == STEPS
    assert twice.train().global_step == STEPS  # nothing to do, and nothing done
    assert same(weights(twice), whole.weights)
    again = trainer(tmp_path / "twice", build(name))
    again.train()
    assert again.evaluate()["eval_loss"] == twice.evaluate()["eval_loss"]


def test_its_state_is_its_own_whole_story(name: str, whole: Whole) -> None:
    """Taken, given to a new one, and taken again: the same."""
    (callback,) = whole.callbacks
    if isinstance(callback, Stateful):
        other = build(name)
        assert isinstance(other, Stateful)
        other.load_state_dict(callback.state_dict())
        assert other.state_dict() == callback.state_dict()
