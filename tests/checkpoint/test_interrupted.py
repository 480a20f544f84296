"""A save interrupted at each of its operations in turn, by an error or by the death of the process."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path

import pytest

from checkpoint.jobs import save_and_die
from checkpoint.parts import Saved
from dalsegno.checkpoint import CheckpointManager
from dalsegno.system import filesystem
from dalsegno.testing import start_ranks


def operations_of_a_save(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    filesystem.make_directory(directory / "checkpoints")  # as for any save but the first
    monkeypatch.setattr(filesystem, "watcher", lambda what, path: seen.append((what, str(path.relative_to(directory)))))
    Saved().save(CheckpointManager(directory), 1)
    monkeypatch.undo()
    return seen


def test_the_order_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is on the disk before its directory is, that before the new name; the manifest is the last of them.
    Small files are flushed in a row, when those of tensors are written."""
    seen = operations_of_a_save(tmp_path, monkeypatch)
    partial = "checkpoints/step-00000001.partial"
    assert seen[-5:] == [
        ("write", f"{partial}/manifest.json"),
        ("fsync", f"{partial}/manifest.json"),
        ("fsync", partial),
        ("rename", "checkpoints/step-00000001"),
        ("fsync", "checkpoints"),
    ]
    before = seen[: seen.index(("rename", "checkpoints/step-00000001"))]
    written = {path for what, path in before if what == "write"}
    assert len(written) == 7
    tensors = max(position for position, (_, path) in enumerate(before) if path.endswith("shard-00000.safetensors"))
    for small in ("index.json", "shared.json", "rank-00000.json"):
        assert before.index(("write", f"{partial}/{small}")) < tensors < before.index(("fsync", f"{partial}/{small}"))
    for path in written:
        last_write = len(before) - before[::-1].index(("write", path))
        synced = before.index(("fsync", path), last_write)
        assert ("fsync", str(Path(path).parent)) in before[synced:]
    for folder in {Path(path).parent for path in written} - {Path(partial)}:
        named = before.index(("mkdir", str(folder)))
        assert ("fsync", partial) in before[named:]


def test_an_error_at_any_operation_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the last one, when it has its name already: what has failed is not there, and can be tried again."""
    count = len(operations_of_a_save(tmp_path, monkeypatch))
    manager, saved = CheckpointManager(tmp_path), Saved()
    for position in range(count):
        calls = iter(range(count + 1))

        def full(what: str, path: Path, calls: object = calls, position: int = position) -> None:
            if next(calls, -1) == position:  # type: ignore[call-overload]
                raise OSError(errno.ENOSPC, "no space left", str(path))

        monkeypatch.setattr(filesystem, "watcher", full)
        with pytest.raises(OSError, match="no space left"):
            saved.save(manager, 2)
        monkeypatch.undo()
        assert [path.name for path in manager.directory.iterdir()] == ["step-00000001"]
        found = CheckpointManager(tmp_path).find()
        assert found is not None and found.step == 1
    saved.save(manager, 2)
    found = CheckpointManager(tmp_path).find()
    assert found is not None and found.step == 2


def test_death_at_any_operation_leaves_the_older_one(tmp_path: Path) -> None:
    steps = []
    for position in itertools.count():
        directory = tmp_path / str(position)
        (end,) = start_ranks(save_and_die, 1, directory, position).wait()
        if end.exit_code == 0:
            break
        assert end.exit_code == 9, end.error
        manager = CheckpointManager(directory)
        manager.remove_partial()
        found = manager.find()
        assert found is not None
        steps.append(found.step)
        again = Saved(seed=1)
        manager.load(found, again.sharded, again.components)
        assert again.notes.state["step"] == found.step
        assert {path.name for path in manager.directory.iterdir()} <= {"step-00000001", "step-00000002"}
    assert len(steps) > 20 and steps == [1] * (len(steps) - 1) + [2]  # renamed, its name not yet on the disk
