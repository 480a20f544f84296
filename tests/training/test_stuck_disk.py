"""A disk that takes nothing any more, and a run that wants to leave: it says for what it waits, and not for ever."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.checkpoint import CheckpointManager, async_save
from dalsegno.system import filesystem, progress
from support.listeners import Listener
from support.small import small_trainer


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk on which the checkpoint of step 4 is not written until this is set."""
    answers = threading.Event()

    def hang(operation: str, path: Path) -> None:
        if operation == "write" and "step-00000004.partial" in str(path):
            assert answers.wait(60)

    monkeypatch.setattr(filesystem, "watcher", hang)
    monkeypatch.setattr(progress, "REPORT_EVERY", 0.05)
    monkeypatch.setattr(async_save, "_GRACE", 0.2)
    yield answers
    answers.set()
    for thread in threading.enumerate():
        if thread.name.startswith("dalsegno-save"):
            thread.join(60)


class Waited(logging.Handler):
    """Calls back at the second warning that a save is waited for."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._then = then

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("waiting for step-00000004"):
            self.lines.append(record.getMessage())
            if len(self.lines) == 2:
                self._then()


@pytest.mark.parametrize("way", ["to the end", "by an error"])
def test_it_is_said_how_far_it_is(tmp_path: Path, hung: threading.Event, way: str) -> None:
    def fail(ctx: Any) -> None:
        if ctx.step == 5:
            raise ValueError("in the middle")

    handlers = {"on_step_end": fail} if way == "by an error" else {}
    trainer = small_trainer(tmp_path, Listener(handlers), max_steps=4 if way == "to the end" else 9, save_steps=2)
    waited = Waited(hung.set)
    logging.getLogger("dalsegno").addHandler(waited)
    try:
        if way == "to the end":
            trainer.train()
        else:
            with pytest.raises(ValueError, match="in the middle"):
                trainer.train()
    finally:
        logging.getLogger("dalsegno").removeHandler(waited)
    assert re.fullmatch(r"waiting for step-00000004: [\d.]+ k?B of [\d.]+ kB written", waited.lines[0]), waited.lines
    found = CheckpointManager(tmp_path).find()
    assert found is not None and found.step == 4


def test_a_disk_that_takes_nothing_is_not_waited_for_for_ever(
    tmp_path: Path, hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = Waited(lambda: monkeypatch.setattr(progress.Progress, "idle", async_save.STUCK))
    logging.getLogger("dalsegno").addHandler(impatient)
    with pytest.raises(ds.SaveFailed, match="step-00000004: no byte was written for 10 minutes; it is cancelled"):
        small_trainer(tmp_path, max_steps=4, save_steps=2).train()
    logging.getLogger("dalsegno").removeHandler(impatient)
    hung.set()  # when the disk answers again, nothing comes of it any more
    for thread in threading.enumerate():
        if thread.name.startswith("dalsegno-save"):
            thread.join(60)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    monkeypatch.undo()
    assert small_trainer(tmp_path, max_steps=4, save_steps=2).train().reason == "finished"


SCRIPT = """
import signal, sys, threading
from pathlib import Path
from dalsegno.system import filesystem, progress
from support.listeners import Listener
from support.small import small_trainer

stuck = threading.Event()

def hang(operation, path):
    if operation == "write" and "step-00000004.partial" in str(path):
        stuck.set()
        threading.Event().wait()

def press_ctrl_c(ctx):
    if ctx.step == 5:
        stuck.wait()
        signal.raise_signal(signal.SIGINT)

filesystem.watcher = hang
progress.REPORT_EVERY = 0.05
small_trainer(Path(sys.argv[1]), Listener({"on_step_end": press_ctrl_c}), max_steps=1_000_000, save_steps=4).train()
"""


def test_a_second_ctrl_c_gives_it_up(tmp_path: Path) -> None:
    """With a real process whose disk never answers. The first asks for an end with a checkpoint, and waits for one."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, tmp_path], cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        assert process.stderr.readline().startswith("SIGINT: training ends here, with a checkpoint")
        assert process.stderr.readline().startswith("waiting for step-00000004: ")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    finally:
        process.kill()
    assert process.returncode != 0 and "KeyboardInterrupt" in errors
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004.partial"]
