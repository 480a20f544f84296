"""Frozen parameters in memory: one file in both slots as long as they stay the same, and never written through."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dalsegno as ds
from checkpoint.frozen import FROZEN
from checkpoint.sameness import assert_same
from dalsegno.checkpoint import (
    Checkpoint,
    ModelState,
    OptimizerState,
    ShardedState,
    in_memory,
    memory_dir,
    read_tensors,
)
from dalsegno.checkpoint.in_memory import MemoryPublication
from dalsegno.checkpoint.snapshot import Snapshotter
from dalsegno.cli import main
from dalsegno.distributed.layout import Layout
from dalsegno.system import filesystem

BASE = 512 * 100 * 4 + 512 * 4
"""Bytes of the frozen parameters. Two thousand others are trained, 8 kB."""


pytestmark = pytest.mark.usefixtures("shared_memory")


class Leg:
    """Saves a model with a frozen base in memory."""

    def __init__(self, output_dir: Path, former: str | None = None) -> None:
        torch.manual_seed(0)
        self.base, self.head = nn.Linear(100, 512).requires_grad_(False), nn.Linear(512, 4)
        self.model = nn.Sequential(self.base, self.head)
        optimizer = torch.optim.AdamW(self.head.parameters())
        self.states: list[ShardedState] = [ModelState(self.model), OptimizerState(self.model, optimizer)]
        self.memory = in_memory.MemoryCheckpoints(output_dir, Layout.flat())
        self.found = self.memory.find({} if former is None else {former: None}, after=-1)
        self.memory.begin_leg(self.states, saving=True)
        self.name = self.memory.name

    def save(self, step: int) -> int:
        """Save with other trained parameters than before, and compare what is saved with the model. Returns the inode
        of the file of frozen parameters, 0 if there is none."""
        self.head.weight.data.fill_(step)
        self.capture(step)
        self.memory.publish()
        self.memory.settle()
        self.expect_saved(step, self.content)
        file = self.memory.path_of(step) / FROZEN
        return file.stat().st_ino if file.exists() else 0

    def capture(self, step: int) -> None:
        self.memory.capture(step, self.states, [], {}, metrics={}, is_finite=True)

    def expect_saved(self, step: int, content: dict[str, torch.Tensor]) -> Checkpoint:
        checkpoint = Checkpoint.open(self.memory.path_of(step))
        checkpoint.verify(checkpoint.manifest.files)
        assert_same(read_tensors(checkpoint)["model"], content)
        return checkpoint

    @property
    def content(self) -> dict[str, torch.Tensor]:
        return {name: each.clone() for name, each in self.model.state_dict().items()}

    @property
    def size(self) -> int:
        return memory_dir.size_of(memory_dir.find_all())

    @property
    def slots(self) -> list[Path]:
        """Both, the published one first."""
        (directory,) = memory_dir.find_all()
        return sorted(directory.checkpoints.iterdir(), key=lambda path: path.name.startswith("slot-"))


@pytest.fixture
def leg(tmp_path: Path) -> Leg:
    return Leg(tmp_path / "run")


def test_an_unchanged_base_is_one_file_in_both_slots(leg: Leg) -> None:
    assert len({leg.save(step) for step in range(1, 6)}) == 1
    assert [(slot / FROZEN).stat().st_nlink for slot in leg.slots] == [2, 2]


def test_it_takes_its_memory_once(leg: Leg) -> None:
    leg.save(1)
    with_one_slot = leg.size
    leg.save(2)
    with_two = leg.size
    assert with_two - with_one_slot < BASE < with_one_slot
    leg.save(3)
    assert leg.size == with_two


def test_it_is_copied_once(leg: Leg, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    capture = Snapshotter.capture

    def counted(*arguments: Any, **options: Any) -> Any:
        snapshot = capture(*arguments, **options)
        copied.append(snapshot.length)
        return snapshot

    monkeypatch.setattr(Snapshotter, "capture", counted)
    for step in range(1, 5):
        leg.save(step)
    assert [length > BASE for length in copied] == [True, False, False, False]


@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_changed_base_is_not_written_through_to_the_checkpoint_before(leg: Leg, before: int) -> None:
    """Neither while it is copied, nor afterwards, when the checkpoint before is hidden."""
    for step in range(1, before + 1):
        inode = leg.save(step)
    content = leg.content
    leg.base.weight.data[3, 3] += 1  # which no version counter shows
    leg.capture(before + 1)
    former = leg.expect_saved(before, content)
    leg.memory.drop()
    changed = leg.save(before + 2)
    _, hidden = leg.slots
    assert changed != inode == (hidden / FROZEN).stat().st_ino
    Checkpoint(hidden, former.manifest).verify([FROZEN])
    assert leg.save(before + 3) == changed


def test_the_memory_of_a_changed_base_is_freed(leg: Leg) -> None:
    """No mapping keeps it, once no checkpoint has it."""
    for step in range(1, 9):
        leg.save(step)
        if step % 3 == 0:
            leg.base.weight.data += 1
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(memory_dir.root()) in line]
    assert mapped and not any("(deleted)" in line for line in mapped)


def test_a_base_that_changes_each_time_is_written_into_the_same_pages(leg: Leg) -> None:
    inodes = []
    for step in range(1, 7):
        inodes.append(leg.save(step))
        leg.base.weight.data += 1
    assert inodes[:2] == inodes[2:4] == inodes[4:] and inodes[0] != inodes[1]


def test_a_parameter_that_is_frozen_or_not_any_more_moves_and_leaves_nothing_behind(leg: Leg) -> None:
    whole = leg.save(1)
    leg.base.bias.requires_grad_(True)
    without_bias = leg.save(2)
    assert whole != without_bias == leg.save(3)
    leg.base.requires_grad_(True)
    assert leg.save(4) == leg.save(5) == 0
    assert not any((slot / FROZEN).exists() for slot in leg.slots)
    leg.base.requires_grad_(False)
    assert leg.save(6) == leg.save(7) != 0


def test_a_file_that_was_removed_is_copied_again(leg: Leg) -> None:
    leg.save(1)
    (leg.memory.path_of(1) / FROZEN).unlink()
    assert leg.save(2) == leg.save(3) != 0


def test_a_file_that_arrives_from_another_host_is_not_written_through_a_link(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    filesystem.rewrite_in_place(one, [b"first"], 5)
    inode = one.stat().st_ino
    filesystem.rewrite_in_place(one, [b"again"], 5)
    assert one.stat().st_ino == inode
    filesystem.link(one, other)
    filesystem.rewrite_in_place(other, [b"other"], 5)
    assert (one.read_bytes(), other.read_bytes()) == (b"again", b"other")


def test_memory_for_one_base_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Two slots with a base of their own would take 496 kB."""
    caplog.set_level("INFO", logger="dalsegno")
    monkeypatch.setattr(in_memory, "free_disk", lambda directory: 290_000)
    leg = Leg(tmp_path / "run")
    assert "memory checkpoints: 211 kB of frozen parameters, and two slots of 36.9 kB in " in caplog.text
    monkeypatch.setattr(in_memory, "free_disk", lambda directory: 270_000)
    message = r"take 211 kB of frozen parameters, and two slots of 36\.9 kB, and 27\d kB are free"
    with pytest.raises(ds.ConfigurationError, match=message):
        leg.memory.begin_leg(leg.states, saving=True)


def test_its_memory_is_reserved_once(leg: Leg, monkeypatch: pytest.MonkeyPatch) -> None:
    files: set[str] = set()
    reserve = filesystem.reserve

    def counted(path: Path, begin: int, length: int) -> None:
        files.add(str(path))
        reserve(path, begin, length)

    monkeypatch.setattr(filesystem, "reserve", counted)
    leg.memory.prepare(leg.states)
    for step in range(1, 4):
        leg.save(step)
    assert sorted(name.endswith(FROZEN) for name in files) == [False, False, True]


def test_a_leg_that_resumes_shares_the_base_of_the_leg_before_and_never_writes_to_it(tmp_path: Path, leg: Leg) -> None:
    inode = leg.save(1)
    assert leg.save(2) == inode
    with (leg.memory.path_of(2) / FROZEN).open("rb") as file:
        before = file.read()
        leg.memory.close(remove=False)
        resumed = Leg(tmp_path / "run", leg.name)
        assert resumed.found is not None and resumed.found.step == 2
        assert [resumed.save(step) for step in (3, 4)] == [inode, inode]
        for step in range(5, 9):
            resumed.base.weight.data += 1
            assert resumed.save(step) != inode
        file.seek(0)
        assert file.read() == before


def test_a_leg_that_resumes_with_another_base_copies_it(tmp_path: Path, leg: Leg) -> None:
    inode = leg.save(1)
    leg.memory.close(remove=False)
    resumed = Leg(tmp_path / "run", leg.name)
    resumed.base.weight.data += 1
    assert inode != resumed.save(2) == resumed.save(3)


def test_a_leg_whose_base_does_not_fit_beside_that_of_the_leg_before_is_not_refused(
    tmp_path: Path, leg: Leg, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is memory for one base and two slots; and the checkpoint that the leg resumed from is not given up."""
    base, former = leg.save(1), leg.memory.path_of(1)
    leg.memory.close(remove=False)
    reserve = filesystem.reserve

    def reserved(path: Path, begin: int, length: int) -> None:
        if memory_dir.size_of(memory_dir.find_all()) + length > 290_000:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        reserve(path, begin, length)

    monkeypatch.setattr(filesystem, "reserve", reserved)
    resumed = Leg(tmp_path / "run", leg.name)
    content = resumed.content
    resumed.base.weight.data += 1
    resumed.memory.prepare(resumed.states)
    resumed.capture(2)
    resumed.memory.publish()
    assert "step 2: there is no room for a memory checkpoint" in caplog.text
    checkpoint = Checkpoint.open(former)
    checkpoint.verify(checkpoint.manifest.files)
    resumed.model.load_state_dict(content)
    assert resumed.save(3) == base


def test_after_a_rollback_the_base_is_still_shared(leg: Leg) -> None:
    for step in (1, 2, 3):
        base = leg.save(step)
    leg.memory.discard()
    assert [leg.save(step) for step in (2, 3, 4)] == [base] * 3


@pytest.mark.parametrize("before", [1, 2])
def test_after_a_rollback_a_state_that_is_not_published_leaves_the_base_as_it_was(leg: Leg, before: int) -> None:
    """The base changes, and is as before once the run goes back again."""
    for step in range(1, before + 1):
        base = leg.save(step)
    content = leg.content
    leg.memory.discard()
    leg.base.weight.data += 1
    leg.capture(2)
    leg.memory.discard()
    leg.model.load_state_dict(content)
    assert leg.save(2) == base


def test_a_publication_that_fails_leaves_the_base_shared(leg: Leg, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError("the test lets it fail")

    for step in (1, 2):
        base = leg.save(step)
    with monkeypatch.context() as failing:
        failing.setattr(MemoryPublication, "publish", fail)
        leg.capture(3)
        leg.memory.publish()
        leg.memory.settle()
    assert leg.memory.path_of(2).exists()
    assert base == leg.save(4) == leg.save(5)


def test_clean_counts_a_file_with_several_names_once(leg: Leg, capsys: pytest.CaptureFixture[str]) -> None:
    """Here a leg has linked the base of the one before, and was killed."""
    leg.save(1)
    before = leg.size
    killed = memory_dir.create(leg.memory._output_dir, "0123456789abcdef")
    (killed.checkpoints / "linked").hardlink_to(leg.memory.path_of(1) / FROZEN)
    leg.memory.close(remove=False)
    assert leg.size - before < BASE
    assert main(["checkpoints", "clean", "--yes"]) == 0
    (freed,) = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" kB freed")]
    assert before - BASE < float(freed.split()[0]) * 1000 < before + BASE
    assert memory_dir.find_all() == []
