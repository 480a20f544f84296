"""Finding, keeping, archiving and carrying checkpoints forward, with real files."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.parts import Notes, RankNotes, Saved, train
from checkpoint.sameness import assert_same
from dalsegno.checkpoint import CheckpointManager, listing, load_parts
from dalsegno.checkpoint.manifest import Manifest, _checksum_of
from dalsegno.errors import (
    ConfigurationError,
    DamagedCheckpoint,
    NotFound,
    SaveFailed,
    StateMismatch,
)
from dalsegno.policies.retention import Best, CheckpointSummary, EveryNth, Latest
from dalsegno.stateful.component import Component
from dalsegno.system import filesystem


def entries_in(manager: CheckpointManager) -> list[CheckpointSummary]:
    return manager._summaries.of(manager.directory)


def steps_in(manager: CheckpointManager) -> list[int]:
    return [entry.step for entry in entries_in(manager)]


def found_step(directory: Path) -> int | None:
    checkpoint = CheckpointManager(directory).find()
    return checkpoint and checkpoint.step


def three_saved(directory: Path) -> CheckpointManager:
    manager, saved = CheckpointManager(directory), Saved()
    for step in (1, 2, 10):
        saved.save(manager, step)
    return manager


# --- finding --------------------------------------------------------------------------------------------------------


def test_nothing_to_find(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    assert manager.find() is None
    with pytest.raises(NotFound, match="step-00000004: there is no such checkpoint"):
        manager.find(manager.path_of(4))


def test_the_newest_is_found_or_the_one_asked_for(tmp_path: Path) -> None:
    manager = three_saved(tmp_path)
    assert found_step(tmp_path) == 10
    asked = manager.find(manager.path_of(2))
    assert asked is not None and asked.step == 2
    again = Saved(seed=1)
    manager.load(asked, again.sharded, again.components)
    assert_same(again.notes.state, {"step": 2, "tensor": torch.full((3,), 2.0)})


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "first byte": lambda path: flip(path, 0),
    "a byte inside": lambda path: flip(path, path.stat().st_size // 2),
    "last byte": lambda path: flip(path, -1),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "gone": lambda path: path.unlink(),
    "a link": lambda path: (path.rename(path.with_suffix(".aside")), path.symlink_to(path.with_suffix(".aside"))),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *(("model/shard-00000.safetensors", damage) for damage in DAMAGES),
        *((file, "a byte inside") for file in ("index.json", "shared.json", "shared.safetensors", "rank-00000.json")),
        *(
            ("manifest.json", damage)
            for damage in ("a byte inside", "cut short", "emptied", "gone", "a link", "a pipe")
        ),
    ],
)
def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(
    tmp_path: Path, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager, saved = CheckpointManager(tmp_path), Saved()
    saved.save(manager, 1)
    saved.save(manager, 2)
    DAMAGES[damage](manager.path_of(2) / file)
    with pytest.raises(DamagedCheckpoint, match=file):
        manager.find(manager.path_of(2))
    assert found_step(tmp_path) == 1
    assert "step-00000002.damaged" in caplog.text and file in caplog.text
    assert not manager.path_of(2).exists() and manager.path_of(2).with_name("step-00000002.damaged").is_dir()
    saved.save(manager, 2)  # the run gets there again
    assert found_step(tmp_path) == 2


def test_a_strict_search_changes_nothing(tmp_path: Path) -> None:
    manager = three_saved(tmp_path)
    flip(manager.path_of(10) / "shared.json", 9)
    with pytest.raises(DamagedCheckpoint, match=r"step-00000010/shared.json: has checksum .* \(strict: no other"):
        manager.find(strict=True)
    assert manager.path_of(10).is_dir()
    flip(manager.path_of(10) / "shared.json", 9)
    again = manager.find(strict=True)
    assert again is not None and again.step == 10


def test_a_run_without_a_valid_checkpoint_does_not_start_over(tmp_path: Path) -> None:
    """Neither at the first attempt nor at the next: nothing has been moved out of sight."""
    manager = three_saved(tmp_path)
    for step in (1, 2, 10):
        (manager.path_of(step) / "index.json").unlink()
    for _ in range(2):
        with pytest.raises(DamagedCheckpoint) as raised:
            manager.find()
        lines = str(raised.value).splitlines()
        assert lines[0] == f"{manager.directory}: no checkpoint is valid:"
        assert [line.split("step-")[1].split(":")[0] for line in lines[1:]] == [
            f"{step:08d}/index.json" for step in (10, 2, 1)
        ]


UNREADABLE = {"a disk that does not answer": errno.EIO, "a stale handle": errno.ESTALE, "no right": errno.EACCES}


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_what_cannot_be_read_is_not_damaged(
    tmp_path: Path, name: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, original = three_saved(tmp_path), getattr(os, call)
    shard = str(manager.path_of(10) / "model/shard-00000.safetensors")

    def fail(what: Any, *rest: Any) -> Any:
        at = what if call == "open" else Path(f"/proc/self/fd/{what}").readlink()
        if str(at) == shard:
            raise OSError(UNREADABLE[name], os.strerror(UNREADABLE[name]), *([shard] if call == "open" else []))
        return original(what, *rest)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError) as raised:
        manager.find()
    assert not isinstance(raised.value, DamagedCheckpoint)
    assert (raised.value.errno, raised.value.filename) == (UNREADABLE[name], shard)
    monkeypatch.undo()
    assert found_step(tmp_path) == 10


def test_any_flipped_byte_of_a_manifest_that_matters_is_found(tmp_path: Path) -> None:
    manager, saved = CheckpointManager(tmp_path), Saved()
    saved.save(manager, 1, metrics={"loss": 2.5}, is_best=True)
    path = manager.path_of(1) / "manifest.json"
    good, content = Manifest.read(path.parent), path.read_bytes()
    for position in range(0, len(content), 7):
        for bit in (1, 32):
            changed = bytearray(content)
            changed[position] ^= bit
            path.write_bytes(changed)
            try:
                assert Manifest.read(path.parent) == good  # white space between two tokens
            except DamagedCheckpoint:
                continue


def test_a_directory_under_a_wrong_name(tmp_path: Path) -> None:
    manager = three_saved(tmp_path)
    manager.path_of(10).rename(manager.path_of(30))
    with pytest.raises(DamagedCheckpoint, match="step-00000030: its manifest is that of step 10"):
        manager.find(manager.path_of(30))


def changed_manifest(path: Path, change: dict[str, object]) -> None:
    """With a matching checksum, as dalsegno would write it."""
    content = json.loads(path.read_bytes()) | change
    del content["xxh3"]
    path.write_text(json.dumps(content | {"xxh3": _checksum_of(content)}))


def test_a_newer_format_is_no_damage(tmp_path: Path) -> None:
    """It stays where it is: the dalsegno that wrote it can read it."""
    manager, saved = CheckpointManager(tmp_path), Saved()
    saved.save(manager, 1)
    changed_manifest(manager.path_of(1) / "manifest.json", {"format": 99})
    with pytest.raises(StateMismatch, match="has format 99; this version of dalsegno reads up to 1"):
        manager.find()
    assert manager.path_of(1).is_dir()


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../../etc/passwd": {"size": 1, "xxh3": "0" * 32}}},
        {"files": {"/etc/passwd": {"size": 1, "xxh3": "0" * 32}}},
        {"files": {"a/../b": {"size": 1, "xxh3": "0" * 32}}},
        {"files": {"model/..": {"size": 1, "xxh3": "0" * 32}}},
        {"files": {"x": {"size": -1, "xxh3": "0" * 32}}},
        {"files": {"x": {"size": 1 << 70, "xxh3": "0" * 32}}},
        {"files": {"x": {"size": 1, "xxh3": "../x"}}},
        {"files": ["x"]},
        {"components": {"x": {"class": "os.system", "version": 1, "scope": "evil"}}},
        {"components": {"x": {"class": "os.system", "version": "1", "scope": "sharded"}}},
        {"step": -1},
        {"step": "1"},
        {"step": True},
        {"world_size": 0},
        {"world_size": 1 << 60},
        {"metrics": {"loss": [1]}},
        {"metrics": 3},
        {"torch": None},
    ],
)
def test_a_hostile_manifest(tmp_path: Path, change: dict[str, object]) -> None:
    manager, saved = CheckpointManager(tmp_path), Saved()
    saved.save(manager, 1)
    path = manager.path_of(1) / "manifest.json"
    changed_manifest(path, change)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
        manager.find(manager.path_of(1))


@pytest.mark.parametrize("operation", ["write", "fsync", "rename"])
def test_an_evaluation_that_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    manager = three_saved(tmp_path)

    def full(what: str, path: Path) -> None:
        if what == operation:
            raise OSError(errno.ENOSPC, "no space left", str(path))

    monkeypatch.setattr(filesystem, "watcher", full)
    with pytest.raises(SaveFailed, match=r"step-00000010 is valid, but its evaluation .*no space left"):
        manager.amend(10, metrics={"eval_loss": 1.0}, is_best=True)
    monkeypatch.undo()
    assert not list(manager.directory.glob("*.partial"))
    found = manager.find()
    assert found is not None and found.step == 10 and not found.manifest.best
    manager.amend(10, metrics={"eval_loss": 1.0}, is_best=True)
    found = manager.find()
    assert found is not None and found.manifest.metrics == {"eval_loss": 1.0} and found.manifest.best


def test_an_unfinished_one_is_no_checkpoint_and_is_cleaned_away(tmp_path: Path) -> None:
    manager = three_saved(tmp_path)
    partial = manager.path_of(11).with_name("step-00000011.partial")
    manager.path_of(10).rename(partial)
    foreign = manager.directory / "notes.partial"
    foreign.mkdir()
    assert found_step(tmp_path) == 2 and partial.exists()
    manager.remove_partial()
    assert not partial.exists() and foreign.exists()


def test_a_step_is_not_saved_twice(tmp_path: Path) -> None:
    manager, saved = CheckpointManager(tmp_path), Saved()
    saved.save(manager, 1)
    with pytest.raises(ConfigurationError, match="step-00000001: there is a checkpoint of this step already"):
        saved.save(manager, 1)
    assert found_step(tmp_path) == 1


# --- keeping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "stay"),
    [
        (None, [1, 2, 3, 4]),
        (Latest(2), [3, 4]),
        (Latest(9), [1, 2, 3, 4]),
        (Best(), [2, 4]),
        (Latest(1) | Best(2), [2, 3, 4]),
        (EveryNth(3), [3, 4]),
        (lambda entries: set(), [4]),
    ],
)
def test_what_stays(
    tmp_path: Path, keep: Callable[[list[CheckpointSummary]], set[int]] | None, stay: list[int]
) -> None:
    """The newest stays under every policy."""
    manager, saved = CheckpointManager(tmp_path), Saved()
    for step, loss in [(1, 9.0), (2, 3.0), (3, 5.0), (4, float("nan"))]:
        saved.save(manager, step, metrics={"loss": loss}, is_best=step <= 2)
    manager = CheckpointManager(tmp_path, keep=keep)
    gone = manager.prune()
    assert steps_in(manager) == stay
    assert gone == [manager.path_of(step) for step in (1, 2, 3, 4) if step not in stay]
    assert sorted(path.name for path in manager.directory.iterdir()) == [manager.path_of(step).name for step in stay]


def test_what_goes_is_hidden_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of it, half a checkpoint is never there under a checkpoint's name."""
    three_saved(tmp_path)
    manager = CheckpointManager(tmp_path, keep=Latest(2))
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(filesystem, "watcher", lambda what, path: seen.append((what, path.name)))
    manager.prune()
    hidden = "step-00000001.partial"
    assert seen == [("rename", hidden), ("fsync", "checkpoints"), ("unlink", hidden)]


def test_the_one_that_was_resumed_from_stays(tmp_path: Path) -> None:
    """Until a newer one is verified: the newest may be damaged."""
    three_saved(tmp_path)
    manager = CheckpointManager(tmp_path, keep=Latest(1))
    manager.find(manager.path_of(2))
    manager.prune()
    assert steps_in(manager) == [2, 10]


def test_one_that_is_damaged_at_a_glance_does_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An older one is kept in its place; it stays itself, for who wants to look at it."""
    three_saved(tmp_path)
    manager = CheckpointManager(tmp_path, keep=Latest(1))
    (manager.path_of(10) / "shared.json").unlink()
    assert manager.prune() == [manager.path_of(1)]
    assert manager.path_of(10).is_dir() and steps_in(manager) == [2]
    assert "step-00000010 is left out: shared.json: No such file or directory" in caplog.text


def test_files_of_kept_ones_are_not_asked_for_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, asked, ask = three_saved(tmp_path), [], Path.lstat

    def lstat(path: Path) -> os.stat_result:
        asked.append(path.relative_to(manager.directory).parts[0])
        return ask(path)

    changed = max(path.stat().st_ctime_ns for path in manager.directory.rglob("*"))
    while time.time_ns() - listing._TICK < changed:  # until a further change bears another time
        pass
    monkeypatch.setattr(Path, "lstat", lstat)
    assert steps_in(manager) == steps_in(manager) == [1, 2, 10]
    assert set(asked) == {"step-00000001", "step-00000002", "step-00000010"}
    asked.clear()
    assert steps_in(manager) == [1, 2, 10] and not asked

    manager.amend(2, metrics={"eval_loss": 0.5}, is_best=True)
    (manager.path_of(10) / "shared.json").unlink()
    asked.clear()
    assert [(entry.step, entry.metrics) for entry in entries_in(manager)] == [(1, {}), (2, {"eval_loss": 0.5})]
    assert set(asked) == {"step-00000002", "step-00000010"}


def test_a_file_that_disappears_while_it_is_listed_is_missing_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it disappears within the same tick of the clock as the last change to its folder."""
    manager, ask = three_saved(tmp_path), Path.lstat
    gone = manager.path_of(10) / "shared.json"
    gone.with_name("other").touch()
    gone.with_name("other").unlink()

    def lstat(path: Path) -> os.stat_result:
        status = ask(path)
        if path == gone:
            path.unlink()
        return status

    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", lstat)
        assert steps_in(manager) == [1, 2, 10]
    assert steps_in(manager) == [1, 2]


def test_files_of_others_are_not_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    three_saved(tmp_path)
    manager = CheckpointManager(tmp_path, keep=Latest(1))
    (manager.path_of(1) / "notes.txt").write_text("mine")
    (manager.directory / "step-latest").mkdir()
    assert manager.prune() == [manager.path_of(2)]
    assert (manager.path_of(1) / "notes.txt").exists() and (manager.directory / "step-latest").exists()
    assert "step-00000001 is not deleted: it contains notes.txt" in caplog.text


def test_one_timeline(tmp_path: Path) -> None:
    manager, rewound = three_saved(tmp_path), tmp_path / "rewound"
    assert manager.archive_after(1, rewound) == [rewound / "step-00000010", rewound / "step-00000002"]
    assert steps_in(manager) == [1]
    Saved().save(manager, 10)
    assert manager.archive_after(1, rewound) == [rewound / "step-00000010.0001"]
    assert manager.archive_after(None, rewound) == [rewound / "step-00000001"]
    assert steps_in(manager) == []
    again = manager.find(rewound / "step-00000010.0001")
    assert again is not None and again.step == 10


# --- carrying -------------------------------------------------------------------------------------------------------


def test_a_state_without_a_taker_waits_for_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = CheckpointManager(tmp_path)
    states = {"a": {"seen": 3, "mean": torch.ones(2)}, "b": ("mine", torch.arange(3))}
    gone = [Component("callbacks.A", Notes(states["a"])), Component("callbacks.B", RankNotes(states["b"]))]
    stays = Component("callbacks.Stays", Notes(1))
    manager.save(1, [], [*gone, stays])
    for step in (2, 3):  # two legs without them
        manager = CheckpointManager(tmp_path)
        checkpoint = manager.find()
        assert checkpoint is not None
        report = manager.load(checkpoint, [], [stays, Component("callbacks.New", Notes())])
        assert (report.restored, report.fresh) == (["callbacks.Stays"], ["callbacks.New"])
        assert sorted(report.carried) == ["callbacks.A", "callbacks.B"]
        assert "carried forward  callbacks.A" in report.table() and "new              callbacks.New" in report.table()
        manager.save(step, [], [stays])
    back = [Component("callbacks.A", Notes()), Component("callbacks.B", RankNotes())]
    checkpoint = manager.find()
    assert checkpoint is not None
    report = manager.load(checkpoint, [], [*back, stays])
    assert not report.carried
    assert_same([each.target.state_dict() for each in back], [states["a"], states["b"]])
    manager.save(4, [], [*back, stays])
    assert list(Manifest.read(manager.path_of(4)).components).count("callbacks.A") == 1


def test_a_former_key(tmp_path: Path) -> None:
    class Renamed(Notes):
        aliases = ("Old", "Older")

    manager = CheckpointManager(tmp_path)
    manager.save(1, [], [Component("callbacks.Older", Notes("kept"))])
    checkpoint = manager.find()
    assert checkpoint is not None
    renamed = Renamed()
    report = manager.load(checkpoint, [], [Component("callbacks.Renamed", renamed)])
    assert renamed.state == "kept" and report.carried == []
    assert report.notes == ["callbacks.Renamed: found under its former key callbacks.Older"]


def test_versions(tmp_path: Path) -> None:
    class Second(Notes):
        state_version = 2

        def migrate(self, state: str, from_version: int) -> str:
            return f"{state}, upgraded from {from_version}"

    manager = CheckpointManager(tmp_path)
    manager.save(1, [], [Component("callbacks.N", Notes("old"))])
    checkpoint = manager.find()
    assert checkpoint is not None
    second = Second()
    manager.load(checkpoint, [], [Component("callbacks.N", second)])
    assert second.state == "old, upgraded from 1"
    manager.save(2, [], [Component("callbacks.N", second)])
    checkpoint = manager.find()
    assert checkpoint is not None
    with pytest.raises(StateMismatch, match=r"callbacks\.N: the saved state has version 2") as raised:
        manager.load(checkpoint, [], [Component("callbacks.N", Notes())])
    assert raised.value.__notes__ == [f"while restoring {checkpoint.path}: callbacks.N"]


def test_what_a_load_state_dict_raises_names_its_component(tmp_path: Path) -> None:
    class Picky(Notes):
        def load_state_dict(self, state: Any) -> None:
            self.state = state["seen"] + 1

    class Formed(Picky):
        state_schema = dict[str, int]

        def state_dict(self) -> Any:
            return self.state

    manager, saved = CheckpointManager(tmp_path), Saved()
    train(saved.model, saved.optimizer, 1)
    manager.save(1, saved.sharded, [Component("callbacks.N", Notes({"seen": "x"}))])
    checkpoint = manager.find()
    assert checkpoint is not None
    with pytest.raises(StateMismatch, match=r"step-00000001: callbacks\.N: .* TypeError: can only concat") as raised:
        manager.load(checkpoint, [], [Component("callbacks.N", Picky())])
    assert isinstance(raised.value.__cause__, TypeError)
    other = Saved(seed=1)
    before = {name: each.clone() for name, each in other.model.state_dict().items()}
    with pytest.raises(StateMismatch, match=r"step-00000001: callbacks\.N\.seen: is 'x'; must be a 64-bit integer"):
        manager.load(checkpoint, other.sharded, [Component("callbacks.N", Formed())])
    assert_same(dict(other.model.state_dict()), before)


def test_model_only_and_what_has_no_place(tmp_path: Path) -> None:
    manager, saved, again = CheckpointManager(tmp_path), Saved(), Saved(seed=1)
    saved.save(manager, 1)
    checkpoint = manager.find()
    assert checkpoint is not None
    load_parts(checkpoint, again.sharded[:1])
    assert torch.equal(again.model[0].weight, saved.model[0].weight) and again.notes.state is None  # type: ignore[index]
    report = manager.load(checkpoint, again.sharded[:1], [])
    assert report.notes == ["optimizer: is in the checkpoint, but nothing takes it; it is not carried forward"]
    manager.save(2, again.sharded[:1], [])
    checkpoint = manager.find()
    assert checkpoint is not None
    assert manager.load(checkpoint, again.sharded, again.components).fresh == ["optimizer"]


def test_states_are_those_of_the_moment_of_the_save(tmp_path: Path) -> None:
    """A component that changes its tensors later changes neither the saved state nor that of a second save."""
    manager, notes = CheckpointManager(tmp_path), Notes({"x": torch.zeros(3)})
    for step in (1, 2):
        notes.state["x"] += 1
        manager.save(step, [], [Component("callbacks.N", notes)])
    for step in (1, 2):
        checkpoint = manager.find(manager.path_of(step))
        assert checkpoint is not None
        other = Notes()
        manager.load(checkpoint, [], [Component("callbacks.N", other)])
        assert_same(other.state, {"x": torch.full((3,), float(step))})


def test_no_warning_from_below(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    manager, saved = CheckpointManager(tmp_path), Saved()
    saved.save(manager, 1)
    checkpoint = manager.find()
    assert checkpoint is not None
    manager.load(checkpoint, saved.sharded, saved.components)
    assert not recwarn.list and not caplog.records
