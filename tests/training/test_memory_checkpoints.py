"""Memory checkpoints: what a run resumes from after a crash, and what is never picked up."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dalsegno as ds
from dalsegno.callbacks import CheckLoss
from dalsegno.checkpoint import ModelState, OptimizerState, in_memory, memory_dir
from dalsegno.cli import main
from dalsegno.distributed.layout import Layout
from dalsegno.logs import RunFile
from dalsegno.system import filesystem
from dalsegno.testing import TinyRegression, compare_runs
from dalsegno.witness import WITNESS
from support.crash import Crash
from support.listeners import Listener
from support.runs import busy_trainer
from support.small import small_trainer

STEPS = 16


def trainer(
    output_dir: Path, crash: int | None = None, *, save_in_memory: str | None = "Every(steps=1)", **changes: Any
) -> ds.Trainer:
    """Saves to disk every eight steps, and in memory after every other step."""
    regular = {"max_steps": STEPS, "save_steps": 8, "save_in_background": False}
    built = busy_trainer(output_dir, **{**regular, "save_in_memory": save_in_memory, **changes})
    if crash is not None:
        built.add_callback(Crash(crash))
    return built


def crash(output_dir: Path, step: int, **options: Any) -> None:
    with pytest.raises(RuntimeError, match="CUDA error"):
        trainer(output_dir, step, **options).train()


def origins(output_dir: Path) -> list[str | None]:
    """Names of the checkpoints that the legs resumed from, marked if they were in memory."""
    run = RunFile(output_dir).load()
    assert run is not None
    paths = [None if each.from_checkpoint is None else Path(each.from_checkpoint) for each in run.legs]
    return [path and ("memory " if path.is_absolute() else "") + path.name for path in paths]


def truncate(checkpoint: Path) -> None:
    shard = checkpoint / "model/shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


def shared_memory(output_dir: Path) -> list[Path]:
    return [each.path for each in memory_dir.find_all() if each.output_dir == output_dir.resolve()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("uninterrupted")
    trainer(output_dir).train()
    return output_dir


def expect_equal(run: Path, uninterrupted: Path, *, but: Sequence[str] = ()) -> None:
    """``but``: parts of the names of values that may differ."""
    comparison = compare_runs(uninterrupted, run)
    differences = [row.difference for row in comparison.rows if row.difference is not None]
    assert all(any(name in each for name in but) for each in differences), comparison.table()


def test_a_crashed_run_resumes_from_memory(tmp_path: Path, uninterrupted: Path) -> None:
    crash(tmp_path, 5)
    crash(tmp_path, 7)
    crash(tmp_path, 11)
    (left,) = shared_memory(tmp_path)
    assert left.stat().st_mode & 0o777 == 0o700
    trainer(tmp_path).train()
    assert origins(tmp_path) == [None, "memory step-00000005", "memory step-00000007", "memory step-00000011"]
    expect_equal(tmp_path, uninterrupted)
    assert shared_memory(tmp_path) == []


def test_the_newest_on_disk_wins_if_it_is_newer(tmp_path: Path, uninterrupted: Path) -> None:
    crash(tmp_path, 8)
    trainer(tmp_path).train()
    assert origins(tmp_path) == [None, "step-00000008"]
    expect_equal(tmp_path, uninterrupted)


def test_it_comes_before_those_on_disk_that_are_older_than_a_damaged_one(tmp_path: Path, uninterrupted: Path) -> None:
    """Step 8 is on disk, step 7 in memory. Without it, nothing valid would be left of the run."""
    crash(tmp_path, 8)
    truncate(tmp_path / "checkpoints/step-00000008")
    trainer(tmp_path).train()
    assert origins(tmp_path) == [None, "memory step-00000007"]
    assert (tmp_path / "checkpoints/step-00000008.damaged").is_dir()
    expect_equal(tmp_path, uninterrupted)


def test_if_it_is_lost_before_the_next_save_the_run_does_not_begin_anew(tmp_path: Path) -> None:
    """Step 8 on disk is damaged, and was renamed when a leg resumed from step 7 in memory."""
    crash(tmp_path, 8)
    truncate(tmp_path / "checkpoints/step-00000008")
    crash(tmp_path, 7)
    for left in shared_memory(tmp_path):
        shutil.rmtree(left)
    for strict in (False, True):
        with pytest.raises(ds.DamagedCheckpoint, match=r"no checkpoint is left but step-00000008\.damaged") as refusal:
            trainer(tmp_path).train(strict=strict)
        assert "resume_from_checkpoint=False starts anew" in refusal.value.__notes__[0]
    assert origins(tmp_path) == [None, "memory step-00000007"]
    assert trainer(tmp_path, max_steps=1, save_in_memory=None).train(resume_from_checkpoint=False).global_step == 1
    assert origins(tmp_path) == [None]


def test_a_strict_resume_counts_no_step_that_an_earlier_leg_gave_up(tmp_path: Path) -> None:
    """Step 8 was damaged, and a leg went on from step 4: it left step 6 on disk and step 7 in memory."""
    crash(tmp_path, 9, save_steps=4, save_in_memory=None)
    truncate(tmp_path / "checkpoints/step-00000008")
    crash(tmp_path, 7, save_steps=2)
    on_disk = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert on_disk == {"step-00000004", "step-00000006", "step-00000008.damaged"}
    trainer(tmp_path, save_steps=2).train(strict=True)
    assert origins(tmp_path) == [None, "step-00000004", "memory step-00000007"]


def test_without_the_setting_it_still_resumes_from_memory(tmp_path: Path, uninterrupted: Path) -> None:
    crash(tmp_path, 5)
    crash(tmp_path, 7, save_in_memory=None)
    trainer(tmp_path, save_in_memory=None).train()
    assert origins(tmp_path) == [None, "memory step-00000005", "memory step-00000005"]
    expect_equal(tmp_path, uninterrupted, but=("settings[0].save_in_memory", "Counts[0].on_before_save"))
    assert shared_memory(tmp_path) == []


def test_a_lost_host_costs_the_steps_since_the_disk(
    tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a host that comes back after another one has trained has a dead timeline in its memory."""
    crash(tmp_path / "run", 11)
    with monkeypatch.context() as elsewhere:
        (tmp_path / "other host").mkdir()
        elsewhere.setenv(memory_dir.PLACE_VARIABLE, str(tmp_path / "other host"))
        crash(tmp_path / "run", 9, save_in_memory=None)
    assert len(shared_memory(tmp_path / "run")) == 1
    trainer(tmp_path / "run").train()
    assert origins(tmp_path / "run") == [None, "step-00000008", "step-00000008"]
    expect_equal(tmp_path / "run", uninterrupted)
    assert shared_memory(tmp_path / "run") == []


def test_after_a_reboot_nothing_counts(tmp_path: Path) -> None:
    """In a directory that is not in memory: what a reboot leaves there may be half of a file."""
    crash(tmp_path, 11)
    (left,) = shared_memory(tmp_path)
    owner = json.loads((left / "owner.json").read_text())
    (left / "owner.json").write_text(json.dumps(owner | {"boot": "another"}))
    crash(tmp_path, 12)
    assert origins(tmp_path) == [None, "step-00000008"]
    shutil.rmtree(left)


def test_a_damaged_one_is_skipped(tmp_path: Path, uninterrupted: Path, caplog: pytest.LogCaptureFixture) -> None:
    crash(tmp_path, 11)
    (left,) = shared_memory(tmp_path)
    (file,) = left.glob("checkpoints/step-*/model/*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    trainer(tmp_path).train()
    assert "no memory checkpoint can be used" in caplog.text and "checksum" in caplog.text
    assert origins(tmp_path) == [None, "step-00000008"]
    expect_equal(tmp_path, uninterrupted)


@pytest.mark.parametrize("origin", [False, "checkpoints/step-00000008"])
def test_what_the_user_left_behind_is_never_picked_up(tmp_path: Path, origin: bool | str) -> None:
    crash(tmp_path, 11)
    beginning = origin if isinstance(origin, bool) else tmp_path / origin
    with pytest.raises(RuntimeError):
        trainer(tmp_path, 8 if origin else 0, save_in_memory=None).train(resume_from_checkpoint=beginning)
    crash(tmp_path, 8 if origin else 1)
    assert origins(tmp_path)[-1] == (None if origin is False else "step-00000008")


def test_an_aborted_run_leaves_nothing(tmp_path: Path) -> None:
    class Abort(ds.Callback):
        def on_step_end(self, ctx: Any) -> None:
            if ctx.state.global_step == 5:
                ctx.control.stop("the loss is NaN", save=False)

    aborted = trainer(tmp_path)
    aborted.add_callback(Abort())
    assert aborted.train().reason == "aborted"
    assert shared_memory(tmp_path) == []


class Preempted(ds.Callback):
    """The signal arrives before the leg's first step."""

    def on_train_begin(self, ctx: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_leg_that_ends_before_its_first_step_loses_nothing(tmp_path: Path, uninterrupted: Path) -> None:
    crash(tmp_path, 11)
    stopped = trainer(tmp_path)
    stopped.add_callback(Preempted())
    assert stopped.train().reason == "stopped"
    assert trainer(tmp_path, max_steps=10).train().reason == "finished"
    trainer(tmp_path).train()
    assert origins(tmp_path)[1:] == ["memory step-00000011"] * 3
    expect_equal(tmp_path, uninterrupted)
    assert shared_memory(tmp_path) == []


def test_a_run_that_was_moved_resumes_from_memory(tmp_path: Path, uninterrupted: Path) -> None:
    crash(tmp_path / "run", 11)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert trainer(tmp_path / "moved").train().reason == "finished"
    assert origins(tmp_path / "moved") == [None, "memory step-00000011"]
    expect_equal(tmp_path / "moved", uninterrupted)
    assert shared_memory(tmp_path / "run") == shared_memory(tmp_path / "moved") == []


def test_a_copy_of_the_run_has_no_part_in_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    crash(tmp_path / "run", 11)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    crash(tmp_path / "copy", 12)
    said = f"{tmp_path / 'copy'} is a copy of the run in {tmp_path / 'run'}, whose memory checkpoint of step 11 stays"
    assert [each for each in caplog.messages if each.startswith(said)]
    crash(tmp_path / "run", 12)
    assert origins(tmp_path / "copy")[-1] == "step-00000008"
    assert origins(tmp_path / "run")[-1] == "memory step-00000011"


class Operations(ds.Callback):
    """The changes on disk between two memory saves, but for the witness of steps, and how much memory is taken."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self.on_disk: dict[int, list[str]] = {}
        self.slots: set[int] = set()

    def on_train_begin(self, ctx: Any) -> None:
        def watch(operation: str, path: Path) -> None:
            if path.is_relative_to(self._output_dir) and path.parent.name != WITNESS:
                self.on_disk.setdefault(ctx.state.global_step, []).append(f"{operation} {path.name}")

        filesystem.watcher = watch

    def on_step_begin(self, ctx: Any) -> None:
        (directory,) = shared_memory(self._output_dir)
        files = 0
        for slot in (directory / "checkpoints").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the saving thread may rename it
                files += len([*(slot / "model").iterdir()])
        self.slots.add(files)

    def on_train_end(self, ctx: Any) -> None:
        filesystem.watcher = None


def test_the_disk_is_not_touched_and_two_slots_are_enough(tmp_path: Path) -> None:
    """Two more steps, of which one logs: its record is all that is written."""
    watched = trainer(tmp_path)
    watched.add_callback(operations := Operations(tmp_path))
    watched.train()
    assert operations.slots <= {0, 1, 2} and 2 in operations.slots
    between = {step: operations.on_disk.get(step, []) for step in (1, 2, 5, 7, 10, 11, 13)}
    assert between == {step: [] for step in between}


def test_refused_before_training_if_it_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_memory, "free_disk", lambda directory: 1000)
    with pytest.raises(ds.ConfigurationError, match=r"two slots of .* are free in .*leave save_in_memory out"):
        trainer(tmp_path).train()
    assert RunFile(tmp_path).load() is None


def test_refused_where_there_is_no_such_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory_dir.PLACE_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(ds.ConfigurationError, match="absent does not exist"):
        trainer(tmp_path / "run").train()


def test_its_size_is_logged_before_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dalsegno")
    crash(tmp_path, 0)
    assert "memory checkpoints: two slots of " in caplog.text


def test_the_computed_size_counts_what_the_optimizer_adds_to_trained_weights_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """4 MB frozen, and 1 MB trained, of which Adam keeps two averages."""
    caplog.set_level(logging.INFO, logger="dalsegno")
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(n * 250_000)) for name, n in (("base", 4), ("lora", 1))})
    model["base"].requires_grad_(False)
    states = [ModelState(model), OptimizerState(model, torch.optim.AdamW([model["lora"]]))]
    checkpoints = in_memory.MemoryCheckpoints(tmp_path, Layout.flat())
    checkpoints.begin_leg(states, saving=True)
    assert "4 MB of frozen parameters, and two slots of 3." in caplog.text
    checkpoints.close(remove=True)


@pytest.mark.parametrize("when", ["Every(minutes=1)", "OnBest()", "Every(seconds=3) | Every(steps=2)"])
def test_a_trigger_by_the_clock_or_a_metric_is_refused(tmp_path: Path, when: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=r"save_in_memory=.* needs steps or epochs"):
        ds.TrainingArguments(tmp_path, save_in_memory=when)


def test_checkpoints_on_disk_are_needed_too(tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match="needs checkpoints on disk"):
        ds.TrainingArguments(tmp_path, save_steps=0, save_in_memory="Every(steps=2)")


def test_a_rollback_leaves_nothing_of_the_dead_timeline(tmp_path: Path) -> None:
    class Back(ds.Callback):
        """Goes back, and dies before the next save."""

        def on_step_end(self, ctx: Any) -> None:
            if ctx.state.global_step == 11:
                ctx.control.roll_back("the loss is bad", by="the test")

        def on_rollback(self, ctx: Any) -> None:
            raise RuntimeError("CUDA error: right after the rollback")

    rolling = trainer(tmp_path, recovery=ds.RecoveryPolicy())
    rolling.add_callback(Back())
    with pytest.raises(RuntimeError, match="right after"):
        rolling.train()
    crash(tmp_path, 0, recovery=ds.RecoveryPolicy())
    assert origins(tmp_path)[-1] == "step-00000000"


def test_before_save_fires_before_each_save_in_memory(tmp_path: Path) -> None:
    announced: list[tuple[int, bool]] = []

    def note(ctx: Any) -> None:
        announced.append((ctx.step, ctx.path.is_relative_to(tmp_path)))

    crashing = trainer(tmp_path, 5, save_steps=3)
    crashing.add_callback(Listener({"on_before_save": note}))
    with pytest.raises(RuntimeError, match="CUDA error"):
        crashing.train()
    assert announced == [(1, False), (2, False), (3, True), (4, False), (5, False)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_in_memory_during_one_to_disk_is_published_after_it(
    tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Step 9 is due while step 8 is on its way to the disk, until step 10 has ended. If that fails, step 8 is missing
    on disk, and a leg that resumed from step 9 could never have it."""
    ended, announced, published = threading.Event(), list[int](), set[str]()

    def hold(operation: str, path: Path) -> None:
        if operation == "write" and path.parent.name == "step-00000008.partial" and path.name == "manifest.json":
            assert ended.wait(60)
            if fails:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def end(ctx: Any) -> None:
        if ctx.step == 10:
            (directory,) = shared_memory(tmp_path)
            published.update(path.name for path in directory.glob("checkpoints/step-*"))
            ended.set()
            for thread in threading.enumerate():
                if thread.name == "dalsegno-save-8":
                    thread.join(60)

    monkeypatch.setattr(filesystem, "watcher", hold)
    settings: dict[str, Any] = {"save_in_background": True, "save_in_memory": "Every(steps=3)"}
    crashing = trainer(tmp_path, 10, **settings)
    crashing.add_callback(Listener({"on_step_end": end, "on_before_save": lambda ctx: announced.append(ctx.step)}))
    with pytest.raises(RuntimeError, match="CUDA error"):
        crashing.train()
    monkeypatch.setattr(filesystem, "watcher", None)
    assert announced == [3, 6, 8, 9]
    assert published == {"step-00000006"}
    trainer(tmp_path, **settings).train()
    assert origins(tmp_path) == [None, f"memory step-{6 if fails else 9:08d}"]
    differing = ("settings[0].save_in_background", "settings[0].save_in_memory", "Counts[0].on_before_save")
    expect_equal(tmp_path, uninterrupted, but=differing)


def test_a_step_whose_loss_is_infinite_is_not_saved_in_memory(tmp_path: Path) -> None:
    """Otherwise the next leg would train on where an uninterrupted run stops."""

    class Infinite(TinyRegression):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x, y) + torch.inf

    checked = small_trainer(
        tmp_path, CheckLoss(), model=Infinite(), max_steps=5, save_steps=5, save_in_memory="Every(steps=2)"
    )
    result = checked.train()
    assert (result.reason, result.global_step, result.stopped_by) == ("aborted", 2, "CheckLoss")
    assert shared_memory(tmp_path) == []


def test_clean_lists_first_and_removes_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crash(tmp_path, 5)
    assert main(["checkpoints", "clean", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert str(tmp_path.resolve()) in shown and "of the last leg" in shown and "add --yes" in shown
    assert len(shared_memory(tmp_path)) == 1
    assert main(["checkpoints", "clean", str(tmp_path), "--yes", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["step"], row["removed"]) == (5, True)
    assert shared_memory(tmp_path) == []
    assert main(["checkpoints", "clean", str(tmp_path)]) == 0
    assert "no memory checkpoints" in capsys.readouterr().out


def test_clean_leaves_those_of_a_live_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Clean(ds.Callback):
        def on_step_begin(self, ctx: Any) -> None:
            if ctx.state.global_step == 3:
                assert main(["checkpoints", "clean", str(tmp_path), "--yes"]) == 0

    live = trainer(tmp_path, 5)
    live.add_callback(Clean())
    with pytest.raises(RuntimeError, match="CUDA error"):
        live.train()
    assert "in use" in capsys.readouterr().out
    assert len(shared_memory(tmp_path)) == 1
