"""Saves beside the training: what is captured, what waits, what a failed one costs, and what leaving waits for."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.checkpoint import Checkpoint, CheckpointManager, saved_states
from dalsegno.distributed import collectives
from dalsegno.system import filesystem
from dalsegno.testing import compare_runs, run_ranks
from support.disks import small_disk
from support.held_saves import hold_save
from support.listeners import Listener
from support.runs import busy_ddp
from support.small import small_trainer

Watch = Callable[[filesystem.Watcher], None]


class Counter(ds.Callback):
    """Counts steps: a state that goes on changing while a checkpoint is written."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, ctx: Any) -> None:
        self.steps = ctx.step

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Sets who is asked before each file operation, on whatever thread."""
    return lambda watcher: monkeypatch.setattr(filesystem, "watcher", watcher)


def checkpoints(output_dir: Path) -> list[str]:
    return sorted(path.name for path in (output_dir / "checkpoints").iterdir())


def whole(path: Path) -> Checkpoint:
    """The checkpoint there, every byte of it compared with its manifest."""
    checkpoint = Checkpoint.open(path)
    checkpoint.verify(checkpoint.manifest.files)
    return checkpoint


def full(*marks: str) -> filesystem.Watcher:
    """A disk that has no room for files whose path contains one of these."""

    def watcher(operation: str, path: Path) -> None:
        if operation == "write" and any(mark in str(path) for mark in marks):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    return watcher


def test_training_goes_on_while_a_save_is_held_up(tmp_path: Path, watch: Watch) -> None:
    """Its bytes wait until four more steps are done; what it holds is the state of its own step all the same."""
    held, go_on = threading.Event(), threading.Event()
    told_at: list[int] = []

    def hold(operation: str, path: Path) -> None:
        if operation == "write" and "step-00000002.partial" in str(path):
            assert threading.current_thread() is not threading.main_thread()
            held.set()
            assert go_on.wait(60)

    def on_step_end(ctx: Any) -> None:
        if ctx.step == 2:
            ctx.control.should_save = True
        if ctx.step == 6:
            assert held.wait(60)
            assert checkpoints(tmp_path) == ["step-00000002.partial"]
            go_on.set()
        if told_at:
            ctx.control.stop("seen")

    def on_save(ctx: Any) -> None:
        whole(ctx.path)
        told_at.append(ctx.trainer.state.global_step)

    watch(hold)
    listener = Listener({"on_step_end": on_step_end, "on_save": on_save}, name="listener")
    small_trainer(tmp_path, Counter(), listener, max_steps=100_000).train()
    assert told_at[0] >= 6
    states = saved_states(Checkpoint.open(tmp_path / "checkpoints/step-00000002"))
    assert states["callbacks.Counter"] == [{"steps": 2}]
    assert states["trainer"][0]["global_step"] == 2


def test_every_checkpoint_that_was_asked_for_exists(tmp_path: Path) -> None:
    """One due at each step: each waits for the one before."""
    events: list[str] = []
    handlers = {
        "on_before_save": lambda ctx: events.append(f"before {ctx.step}"),
        "on_save": lambda ctx: events.append(f"saved {ctx.step}"),
    }
    result = small_trainer(tmp_path, Listener(handlers), max_steps=5, save_steps=1).train()
    assert checkpoints(tmp_path) == [f"step-0000000{step}" for step in range(1, 6)]
    assert events == [word for step in range(1, 6) for word in (f"before {step}", f"saved {step}")]
    assert result.checkpoint == tmp_path / "checkpoints/step-00000005"


def test_without_threads_a_save_is_told_of_in_its_own_step(tmp_path: Path) -> None:
    saved: list[tuple[int, int]] = []
    listener = Listener({"on_save": lambda ctx: saved.append((ctx.step, ctx.state.global_step))})
    small_trainer(tmp_path, listener, max_steps=6, save_steps=2, save_in_background=False).train()
    assert saved == [(2, 2), (4, 4), (6, 6)]


def test_both_ways_write_the_same(tmp_path: Path) -> None:
    for way in (True, False):
        small_trainer(tmp_path / str(way), Counter(), max_steps=6, save_steps=2, save_in_background=way).train()
    rows = compare_runs(tmp_path / "True", tmp_path / "False").rows
    assert [row.what for row in rows if not row.identical] == ["settings"]  # which name the way


def test_a_failed_save_is_said_once_and_the_next_one_works(
    tmp_path: Path, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    saved: list[int] = []
    watch(full("step-00000004.partial"))
    listener = Listener({"on_save": lambda ctx: saved.append(ctx.step)})
    with caplog.at_level(logging.ERROR):
        assert small_trainer(tmp_path, listener, max_steps=8, save_steps=2).train().reason == "finished"
    assert saved == [2, 6, 8]
    assert checkpoints(tmp_path) == ["step-00000002", "step-00000006", "step-00000008"]
    (message,) = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert "step-00000004" in message and "No space left on device" in message


def test_too_many_failed_saves_in_a_row_end_the_run(tmp_path: Path, watch: Watch) -> None:
    watch(full("step-00000004.partial", "step-00000006.partial"))
    with pytest.raises(ds.SaveFailed, match="No space left on device"):
        small_trainer(tmp_path, max_steps=20, save_steps=2, max_failed_saves=2).train()
    assert checkpoints(tmp_path) == ["step-00000002"]
    whole(tmp_path / "checkpoints/step-00000002")


def test_the_last_save_must_not_fail_silently(tmp_path: Path, watch: Watch) -> None:
    watch(full("step-00000006.partial"))
    with pytest.raises(ds.SaveFailed, match="step-00000006 was not saved"):
        small_trainer(tmp_path, max_steps=6, save_steps=4).train()
    assert checkpoints(tmp_path) == ["step-00000004"]
    watch(lambda operation, path: None)
    assert small_trainer(tmp_path, max_steps=6, save_steps=4).train().reason == "finished"


def test_who_wants_no_checkpoint_hears_of_no_failed_one(
    tmp_path: Path, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its failure was logged, and the result names the newest checkpoint."""
    watch(full("step-00000004.partial"))

    def stop(ctx: Any) -> None:
        if ctx.step == 5:
            ctx.control.stop("seen enough", save=False)

    result = small_trainer(tmp_path, Listener({"on_step_end": stop}), max_steps=9, save_steps=2).train()
    assert (result.reason, result.why, result.global_step) == ("aborted", "seen enough", 5)
    assert result.checkpoint == tmp_path / "checkpoints/step-00000002"
    assert caplog.text.count("step-00000004 was not saved") == 1


def test_leaving_by_an_error_waits_for_the_save(tmp_path: Path, watch: Watch) -> None:
    left = threading.Event()

    def hold(operation: str, path: Path) -> None:
        if operation == "write" and "step-00000002.partial" in str(path):
            assert left.wait(60)

    def on_step_end(ctx: Any) -> None:
        if ctx.step == 3:
            left.set()
            raise ValueError("in the middle")

    watch(hold)
    before = set(threading.enumerate())  # other tests' among them
    with pytest.raises(ValueError, match="in the middle"):
        small_trainer(tmp_path, Listener({"on_step_end": on_step_end}), max_steps=9, save_steps=2).train()
    whole(tmp_path / "checkpoints/step-00000002")
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("dalsegno")]


def train_with_a_full_disk(output_dir: Path) -> None:
    """Rank 1 cannot write its part of one checkpoint."""
    if collectives.rank() == 1:
        filesystem.watcher = full("step-00000018.partial/rank-00001")
    busy_ddp(output_dir).train()


def test_what_one_rank_cannot_write_none_has_saved(tmp_path: Path) -> None:
    """And all go on together; the run is the same as any other."""
    run_ranks(train_with_a_full_disk, 2, tmp_path / "hurt")
    assert checkpoints(tmp_path / "hurt") == [f"step-000000{step}" for step in (14, 16, 20)]
    run_ranks(train_well, 2, tmp_path / "well")
    assert compare_runs(tmp_path / "well", tmp_path / "hurt").identical


def train_well(output_dir: Path) -> None:
    busy_ddp(output_dir).train()


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_that_is_really_full(tmp_path: Path, background: bool) -> None:
    """What fitted is whole; what did not is an error with figures, and leaves no half checkpoint."""
    with small_disk(tmp_path / "disk", kilobytes=256) as disk:
        trainer = small_trainer(disk, max_steps=1000, save_steps=1, max_failed_saves=2, save_in_background=background)
        with pytest.raises(ds.SaveFailed, match=r"(it takes .* are free on the disk|No space left)"):
            trainer.train()
        names = checkpoints(disk)
        assert names and not [name for name in names if name.endswith(".partial")]
        assert CheckpointManager(disk).find() is not None
        assert os.statvfs(disk).f_bavail * 4096 < 200_000


def test_on_save_has_the_state_of_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is published three steps later; a save that nothing has overtaken has the run's own state."""
    seen: list[tuple[int, int, int, float, int]] = []

    def note(ctx: ds.SaveContext) -> None:
        state = ctx.state
        seen.append((ctx.step, state.global_step, state.samples_seen, state.epoch, ctx.trainer.state.global_step))

    def reset_flops(ctx: ds.SaveContext) -> None:
        ctx.state.total_flos = 7.0

    holder = hold_save(monkeypatch, 4, until=7)
    listeners = [Listener({"on_save": note}), Listener({"on_save": reset_flops}, name="setter")]
    trainer = small_trainer(tmp_path, holder, *listeners, max_steps=8, save_steps=4)
    trainer.train()
    assert seen[0] == (4, 4, 16, 0.8, 7)
    assert seen[-1] == (8, 8, 32, 1.6, 8)
    assert trainer.state.total_flos == 7.0
