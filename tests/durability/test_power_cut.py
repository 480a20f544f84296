"""The power fails, at any moment of a run that saves, prunes, is resumed and goes back: what was published is there."""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest
import torch

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.checkpoint import Checkpoint, CheckpointManager, saved_states
from dalsegno.logs import Position, RunFile, read_records
from dalsegno.logs.rewind import rewind
from dalsegno.testing import TinyRegression, compare_runs
from durability.disk import Operation, Recorder, Rename, Sync, states, undisturbed, write_tree
from support.listeners import Listener
from support.small import small_trainer

SEED = 2026
STEPS = 14
LOGS = {"callbacks.JsonLogger": "logs/train.jsonl", "callbacks.ArrayLogger": "logs/train.json"}
"""Path of each log, by the component that continues it."""
_CHECKPOINT = re.compile(r"checkpoints/(step-(\d{8}))")


class PowerCut(Exception):
    """What ends a leg here, in the middle of everything."""


def trainer(output_dir: Path, *, breaks_at: int | None = None) -> ds.Trainer:
    """With a log of each kind: lines, and an array."""

    def on_step_end(ctx: ds.StepEndContext) -> None:
        if ctx.step == breaks_at:
            raise PowerCut

    torch.manual_seed(0)
    model = TinyRegression()
    model.layers[0].requires_grad_(False)  # its file is a link to that of the checkpoint before
    return small_trainer(
        output_dir,
        *(JsonLogger(path=log, name=key.partition(".")[2]) for key, log in LOGS.items()),
        Listener({"on_step_end": on_step_end}, name="breaker"),
        model=model,
        length=24,
        max_steps=STEPS,
        logging_steps=1,
        save_steps=3,
        save_total_limit=2,
    )


def eventful_run(output_dir: Path) -> None:
    """Three legs: broken off behind a checkpoint, resumed and broken off again, resumed from the checkpoint before."""
    with pytest.raises(PowerCut):
        trainer(output_dir, breaks_at=8).train()
    with pytest.raises(PowerCut):
        trainer(output_dir, breaks_at=11).train()
    trainer(output_dir).train(resume_from_checkpoint=output_dir / "checkpoints" / "step-00000006")


def published(operations: list[Operation]) -> Iterator[int]:
    """For every prefix: the newest step whose checkpoint has got its name, for certain, and has not been taken away."""
    named: dict[str, tuple[int, int]] = {}  # name → its step, the folder that must be synced
    certain: dict[str, int] = {}
    yield 0
    for operation in operations:
        if isinstance(operation, Rename):
            certain.pop(operation.name, None)
            if match := _CHECKPOINT.fullmatch(operation.target):
                named[match[1]] = int(match[2]), operation.to_folder
        elif isinstance(operation, Sync):
            settled = [name for name, (_, folder) in named.items() if folder == operation.what]
            certain |= {name: named.pop(name)[0] for name in settled}
        yield max(certain.values(), default=0)


@dataclass(frozen=True, slots=True)
class Cut:
    """A state of the disk."""

    after: int
    tree: dict[str, bytes | None]
    published: int


def distinct_cuts(operations: list[Operation]) -> list[Cut]:
    known: set[int] = set()
    cuts = []
    newest = list(published(operations))
    for length, disk in states(operations, SEED):
        tree = disk.tree()
        seen_as = hash((frozenset(tree.items()), newest[length]))
        if seen_as not in known:
            known.add(seen_as)
            cuts.append(Cut(length, tree, newest[length]))
    return cuts


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run, and what the power may leave of it."""

    operations: list[Operation]
    cuts: list[Cut]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("power") / "run"
    folder.mkdir()
    recorder = Recorder(folder)
    with pytest.MonkeyPatch.context() as patch, recorder.recording(patch):
        eventful_run(folder)
    there = {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != ".lock"
    }
    assert undisturbed(recorder.operations).tree() == there, "an operation has gone by the recorder"
    return Recorded(recorder.operations, distinct_cuts(recorder.operations))


class Positions:
    """Where the logs continue after each checkpoint, read once of each: thousands of disks have the same ones."""

    def __init__(self) -> None:
        self._known: dict[bytes, dict[str, Position]] = {}

    def of(self, checkpoint: Checkpoint) -> dict[str, Position]:
        """By path. ``checkpoint`` has been verified against its manifest, which has the checksum of every byte."""
        manifest = (checkpoint.path / "manifest.json").read_bytes()
        if manifest not in self._known:
            states = saved_states(checkpoint)
            self._known[manifest] = {log: Position.from_state(states[key][0]) for key, log in LOGS.items()}
        return self._known[manifest]


def check(cut: Cut, positions: Positions, folder: Path) -> None:
    """What a new leg does first, on that disk."""
    write_tree(cut.tree, folder)
    manager = CheckpointManager(folder)
    manager.remove_partial()
    found = manager.find()
    assert (found.step if found else 0) >= cut.published
    assert not list(folder.rglob("*.damaged*"))
    RunFile(folder).load()
    if found is None:
        return
    for log, position in positions.of(found).items():
        report = rewind(folder, PurePosixPath(log), position)
        assert report.action in ("unchanged", "rewound")
        kept = folder / "kept.jsonl"
        kept.write_bytes((folder / log).read_bytes()[: position.offset])
        steps = [record["global_step"] for record in read_records(kept) if record.get("kind") != "header"]
        assert steps == list(range(1, found.step + 1)), log


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Where a file costs half of what it costs on a disk."""
    with tempfile.TemporaryDirectory(dir=os.environ["DALSEGNO_SHARED_MEMORY"]) as folder:
        yield Path(folder)


def test_every_moment(recorded: Recorded, in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operations, cuts, positions = recorded.operations, recorded.cuts, Positions()
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # thousands of disks, each looked at once
    assert len(operations) > 250 and len(cuts) > 1000 and max(cut.published for cut in cuts) == STEPS
    for number, cut in enumerate(cuts):
        folder = in_memory / str(number)
        try:
            check(cut, positions, folder)
        except BaseException as error:
            error.add_note(f"after {cut.after} operations, the last being {operations[cut.after - 2 : cut.after]}")
            raise
        shutil.rmtree(folder)


def test_some_moments_to_the_end(recorded: Recorded, tmp_path: Path) -> None:
    """Trained on from what is left: bit by bit the run that was never cut off."""
    cuts = [cut for cut in recorded.cuts if "run.json" in cut.tree]
    trainer(tmp_path / "whole").train()
    for number, cut in enumerate(random.Random(SEED).sample(cuts, 12)):
        folder = tmp_path / str(number)
        write_tree(cut.tree, folder)
        result = trainer(folder).train()
        assert result.reason == "finished", f"after {cut.after} operations: {result}"  # a stray signal would stop it
        comparison = compare_runs(tmp_path / "whole", folder)
        left = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert comparison.identical, f"after {cut.after} operations: {left}\n{comparison.table()}"
