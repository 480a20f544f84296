"""Slots and directories of memory checkpoints: no room, failures midway, and other runs on the host."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dalsegno as ds
from dalsegno.checkpoint import ModelState, async_save, in_memory, memory_dir
from dalsegno.checkpoint.file_writing import MappedFile
from dalsegno.checkpoint.staging import Copying
from dalsegno.cli import main
from dalsegno.distributed import collectives
from dalsegno.distributed.layout import Layout
from dalsegno.errors import ConfigurationError, SaveFailed
from dalsegno.system import filesystem
from dalsegno.testing import TinyRegression, run_ranks
from support.small import small_trainer

pytestmark = pytest.mark.usefixtures("shared_memory")


class Leg:
    """Saves the weights of a model in memory."""

    def __init__(self, output_dir: Path, name: str | None = None, size: int = 64) -> None:
        self.states = [ModelState(nn.ModuleList([nn.Linear(size, size) for _ in range(2)]))]
        self.memory = in_memory.MemoryCheckpoints(output_dir, Layout.flat())
        self.found = self.memory.find({} if name is None else {name: None}, after=-1)
        self.memory.begin_leg(self.states, saving=True)

    def save(self, step: int, *, settle: bool = True) -> None:
        self.memory.capture(step, self.states, [], {}, metrics={}, is_finite=True)
        self.memory.publish()
        if settle:
            self.memory.settle()

    @property
    def directory(self) -> memory_dir.MemoryDir:
        (directory,) = memory_dir.find_all()
        return directory

    @property
    def published(self) -> list[str]:
        return sorted(path.name for path in self.directory.checkpoints.glob("step-*"))


def saves_without_room_on_one_rank(output_dir: Path) -> list[list[str]]:
    """What is published after each of three saves; for the second, rank 1 has no room."""
    leg, published = Leg(output_dir), []
    map_new = filesystem.map_new

    def refuse(path: Path, length: int) -> Any:
        filesystem.map_new = map_new
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    for step in (1, 2, 3):
        if step == 2 and collectives.rank() == 1:
            filesystem.map_new = refuse
        leg.save(step)
        published.append(collectives.from_rank_zero(lambda: leg.published))
    return published


def test_no_room_on_one_rank_skips_the_save_on_all_ranks(tmp_path: Path) -> None:
    for published in run_ranks(saves_without_room_on_one_rank, 2, tmp_path / "run", timeout=60.0):
        assert published == [["step-00000001"], ["step-00000001"], ["step-00000003"]]


def test_an_error_of_a_copy_is_not_taken_for_a_lack_of_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks may have copied their states: one that skipped the save would keep theirs waiting."""

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    leg = Leg(tmp_path / "run")
    leg.save(1)
    monkeypatch.setattr(Copying, "run", fail)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        leg.save(2)
    leg.memory.close(remove=True)


def test_only_headers_are_reserved_while_training_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of which nothing was used before takes seconds for each 10 GB."""
    reserved: dict[str, int] = {}
    is_prepared = threading.Event()
    reserve = filesystem.reserve

    def counted(path: Path, begin: int, length: int) -> None:
        thread = threading.current_thread().name
        reserved[thread] = reserved.get(thread, 0) + length
        reserve(path, begin, length)
        if reserved.get("dalsegno-prepare", 0) >= 2 * 8_000_000:
            is_prepared.set()

    monkeypatch.setattr(filesystem, "reserve", counted)
    leg = Leg(tmp_path / "run", size=1000)
    leg.memory.prepare(leg.states)
    assert is_prepared.wait(60)
    for step in (1, 2, 3):
        leg.save(step)
    assert reserved.keys() == {"dalsegno-prepare", threading.current_thread().name}
    assert reserved[threading.current_thread().name] <= 2 * 8192
    assert leg.directory.size >= sum(reserved.values())
    leg.memory.close(remove=True)


def test_memory_that_is_gone_when_it_is_reserved_fails_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is written to only where it is reserved: the process would be killed."""
    reserve = filesystem.reserve

    def refuse(path: Path, begin: int, length: int) -> None:
        if begin + length > 3_000_000:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        reserve(path, begin, length)

    leg = Leg(tmp_path / "run", size=1000)
    monkeypatch.setattr(filesystem, "reserve", refuse)
    leg.memory.prepare(leg.states)
    with pytest.raises(ConfigurationError, match=r"do not fit into .*No space left on device.*more room"):
        leg.save(1)
    assert not [*leg.directory.checkpoints.glob("slot-*-0/*/*.safetensors")]
    assert not caplog.text
    leg.memory.close(remove=True)


def test_what_the_optimizer_adds_is_compared_with_the_room_after_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leg = Leg(tmp_path / "run")
    monkeypatch.setattr(in_memory, "free_disk", lambda path: 100_000)
    leg.memory.prepare(leg.states)
    leg = Leg(tmp_path / "run")
    leg.states.append(ModelState(nn.Linear(100, 100), key="more"))
    with pytest.raises(ConfigurationError, match="memory checkpoints take two slots"):
        leg.memory.prepare(leg.states)
    leg.memory.close(remove=True)


def test_a_crashed_run_fits_again_where_it_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host with memory for two slots of 2 MB: the former leg's checkpoint is freed by the first save."""
    monkeypatch.setattr(in_memory, "free_disk", lambda path: 1 << 30)
    monkeypatch.setattr(
        in_memory, "available_memory", lambda: 5_000_000 - sum(each.size for each in memory_dir.find_all())
    )
    crashed = Leg(tmp_path / "run", size=500)
    crashed.save(1)
    crashed.save(2)
    name = crashed.memory.name
    crashed.memory.close(remove=False)
    resumed = Leg(tmp_path / "run", name, size=500)
    assert resumed.found is not None and resumed.found.step == 2
    resumed.save(3)
    assert resumed.published == ["step-00000003"]


def test_a_save_that_is_stuck_is_not_taken_for_a_published_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leg = Leg(tmp_path / "run")
    leg.save(1)
    released = threading.Event()
    write_to = MappedFile.write_to

    def wait(file: MappedFile, directory: Path, advance: Any) -> Any:
        released.wait()
        return write_to(file, directory, advance)

    monkeypatch.setattr(async_save, "STUCK", 0.0)
    monkeypatch.setattr(MappedFile, "write_to", wait)
    leg.save(2, settle=False)
    try:
        with pytest.raises(SaveFailed, match="no byte was written"):
            leg.save(3)
    finally:
        released.set()
    leg.memory.close(remove=False)
    assert leg.published == ["step-00000001"]


def test_containers_that_share_memory_leave_each_other_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both have a run in a directory of the same path, of which each container sees its own."""
    output_dir = tmp_path / "run"
    Leg(output_dir).save(1)
    output_dir.rename(tmp_path / "run in the other container")
    output_dir.mkdir()
    (theirs,) = memory_dir.find_all()
    assert memory_dir.containing(theirs.checkpoints / "step-00000001", output_dir) is None
    memory_dir.remove_others(output_dir)
    for directories in ([], [str(output_dir)]):
        assert main(["checkpoints", "clean", "--yes", "--json", *directories]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert (row["state"], row["removed"]) == ("of another container, or of a deleted run", False)
    output_dir.rmdir()
    assert main(["checkpoints", "clean", "--yes"]) == 0
    assert len(memory_dir.find_all()) == 1
    assert main(["checkpoints", "clean", "--yes", str(output_dir)]) == 0
    assert memory_dir.find_all() == []


def test_a_publication_that_fails_midway_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leg = Leg(tmp_path / "run")
    leg.save(1)
    fsync_directory = filesystem.fsync_directory
    hidden = leg.directory.checkpoints
    former = hidden / "step-00000001"

    def fail(path: Path) -> None:
        if path == hidden and not former.exists():
            monkeypatch.setattr(filesystem, "fsync_directory", fsync_directory)
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        fsync_directory(path)

    monkeypatch.setattr(filesystem, "fsync_directory", fail)
    leg.save(2)
    assert leg.published == ["step-00000001"]
    leg.save(3)
    assert leg.published == ["step-00000003"]


def test_the_base_is_left_out_in_memory_too(tmp_path: Path) -> None:
    def trainer(seed: int, *callbacks: ds.Callback) -> ds.Trainer:
        torch.manual_seed(seed)
        model = TinyRegression()
        model.layers[0].requires_grad_(False)
        settings: dict[str, Any] = {
            "save_frozen": "never",
            "save_steps": 2,
            "max_steps": 8,
            "save_in_memory": "Every(steps=1)",
        }
        settings |= {"save_in_background": False, "lr_scheduler_type": "constant"}
        return small_trainer(tmp_path / "run", *callbacks, model=model, **settings)

    class Crash(ds.Callback):
        def on_step_begin(self, ctx: Any) -> None:
            if ctx.state.global_step == 5:
                raise RuntimeError("CUDA error")

    with pytest.raises(RuntimeError, match="CUDA error"):
        trainer(0, Crash()).train()
    (left,) = memory_dir.find_all()
    assert left.newest_step == 5
    with pytest.raises(ds.StateMismatch, match=r"layers\.0\.bias: has other values"):
        trainer(1).train()


def test_a_refused_leg_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_memory, "free_disk", lambda path: 1000)
    with pytest.raises(ds.ConfigurationError, match="two slots of"):
        Leg(tmp_path / "run")
    assert memory_dir.find_all() == []


def test_a_leg_that_cannot_create_its_slots_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(filesystem, "mkdir_nosync", refuse)
    with pytest.raises(OSError, match="No space left"):
        Leg(tmp_path / "run")
    assert [*memory_dir.root().iterdir()] == []


def test_a_leg_whose_ranks_do_not_see_its_directory_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_dir, "find", lambda name: None)
    with pytest.raises(ds.ConfigurationError, match="run all ranks of a host as the same user"):
        Leg(tmp_path / "run")
    assert memory_dir.find_all() == []
