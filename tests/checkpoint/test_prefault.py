"""Buffers and the plan of who writes what: prepared before the first save, and kept between saves."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import jobs
from checkpoint.parts import Saved
from dalsegno.checkpoint import Checkpoint, CheckpointManager, plan, read_tensors
from dalsegno.checkpoint.contract import TensorsByComponent
from dalsegno.testing import run_ranks
from support.heavy import MB, growth_in_the_first_save
from support.listeners import Listener
from support.small import small_trainer


def test_the_first_save_finds_its_memory_ready(tmp_path: Path) -> None:
    """128 MB are captured. A save that comes before anything could be made ready shows what that saves."""
    (ready,) = run_ranks(growth_in_the_first_save, 1, tmp_path / "ready", 3)
    (unready,) = run_ranks(growth_in_the_first_save, 1, tmp_path / "unready", 1)
    assert ready < 16 * MB
    assert unready > 120 * MB


def test_processes_that_are_forked_do_not_take_the_memory_away(tmp_path: Path) -> None:
    """Workers of a DataLoader. Of pages that they share, the next save would copy each before it writes to it."""
    (faults,) = run_ranks(jobs.page_faults_of_a_save_after_a_fork, 1, tmp_path, 64 * MB)
    assert faults < 64 * MB // resource.getpagesize() // 4


def test_a_process_that_is_forked_may_free_the_memory() -> None:
    """Its garbage may contain buffers. Where they were, it must not have memory of its own by then."""
    assert run_ranks(jobs.free_a_buffer_in_a_fork, 1, 8 * MB) == [0]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each time that it is worked out who writes what."""
    asked: list[int] = []
    original = plan.plan

    def counted(tensors: TensorsByComponent, *names: plan.FrozenNames) -> plan.Plan:
        asked.append(1)
        return original(tensors, *names)

    monkeypatch.setattr(plan, "plan", counted)
    return asked


def test_a_run_plans_once(tmp_path: Path, plans: list[int]) -> None:
    small_trainer(tmp_path, max_steps=8, save_steps=2).train()
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4
    assert len(plans) == 2  # before the first step, and once it has made the optimizer its state


@pytest.mark.parametrize("change", ["a tensor more", "another shape", "another type"])
def test_what_has_another_layout_is_planned_anew(tmp_path: Path, plans: list[int], change: str) -> None:
    new = {
        "a tensor more": ("more", torch.arange(3)),
        "another shape": ("table", torch.arange(7.0)),
        "another type": ("table", torch.arange(5, dtype=torch.float64)),
    }

    def on_step_end(ctx: Any) -> None:
        if ctx.step == 5:
            ctx.model.register_buffer(*new[change])

    trainer = small_trainer(tmp_path, Listener({"on_step_end": on_step_end}), max_steps=8, save_steps=2)
    trainer.model.register_buffer("table", torch.arange(5.0))
    trainer.train()
    assert len(plans) == 3  # before the first step, after it, and for the new layout
    name, tensor = new[change]
    for step in (2, 4, 6, 8):
        checkpoint = Checkpoint.open(tmp_path / f"checkpoints/step-{step:08d}")
        checkpoint.verify(checkpoint.manifest.files)
        saved = read_tensors(checkpoint)["model"]
        expected = tensor if step > 5 else torch.arange(5.0) if name == "table" else None
        assert (saved.get(name) is None) == (expected is None)
        assert expected is None or (saved[name].dtype == expected.dtype and torch.equal(saved[name], expected))


def test_the_states_that_an_optimizer_gets_later_are_in_the_plan(tmp_path: Path, plans: list[int]) -> None:
    manager, saved = CheckpointManager(tmp_path), Saved()
    manager.save(0, saved.sharded, saved.components)
    assert len(plans) == 1
    saved.save(manager, 1)
    saved.save(manager, 2)
    assert len(plans) == 2
    again, found = Saved(seed=1), manager.find()
    assert found is not None
    manager.load(found, again.sharded, again.components)
    again.assert_same_as(saved)


def test_ranks_plan_together_if_one_has_to(tmp_path: Path) -> None:
    """One that has lost its plan, here with a manager that has never saved: else the other would not be there."""
    assert run_ranks(jobs.save_where_one_rank_begins_anew, 2, tmp_path) == [[1, 1, 2], [1, 1, 2]]
    assert run_ranks(jobs.find_only, 1, tmp_path)[0][0] == 3
