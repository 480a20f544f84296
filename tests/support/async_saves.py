"""Saves that two ranks make together, and what befalls one of them on the way. For processes of their own."""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

import dalsegno as ds
from checkpoint.parts import RankNotes
from dalsegno.checkpoint import CheckpointManager
from dalsegno.distributed import collectives
from dalsegno.stateful.component import Component
from dalsegno.system import filesystem
from support.listeners import Listener
from support.small import small_trainer


class Notes(RankNotes, ds.Callback):
    """Each rank's own. ``make_durable`` is given; it receives the number of its calls."""

    def __init__(self, make_durable: Callable[[int], object] = int) -> None:
        RankNotes.__init__(self, torch.zeros(100))
        self._make_durable = make_durable
        self._calls = 0

    def make_durable(self) -> None:
        self._calls += 1
        self._make_durable(self._calls)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- one rank meets an error ------------------------------------------------------------------------------------------

TROUBLES: dict[int, tuple[int, str, str]] = {
    2: (0, "mkdir", ".partial"),
    4: (0, "write", "index.json"),
    6: (1, "write", "rank-00001.safetensors"),
    8: (1, "fsync", "rank-00001.json"),
    10: (0, "fsync", ".partial"),
    12: (0, "write", "manifest.json"),
    14: (0, "rename", ""),
    16: (0, "fsync of the folder", ""),
    18: (1, "durable", "an error"),
    20: (1, "durable", "an exit"),
}
"""By step: the rank, the operation, and what its path ends in."""


class Trouble:
    """Raises where it is said to. For ``files.watcher``."""

    def __init__(self) -> None:
        self._is_named = False  # the one whose name is about to be forced to the disk

    def __call__(self, operation: str, path: Path) -> None:
        step = next((int(each.name[5:13]) for each in (path, *path.parents) if each.name.startswith("step-")), None)
        rank, wanted, end = TROUBLES.get(step or 0, (-1, "", ""))
        if rank == collectives.rank() and operation == wanted and path.name.endswith(end):
            raise OSError(errno.EIO, f"no {operation}", str(path))
        if path.name == "checkpoints" and operation == "fsync" and self._is_named:
            self._is_named = False
            raise OSError(errno.EIO, "no fsync of the folder", str(path))
        if operation == "rename" and wanted == "fsync of the folder" and not path.name.endswith(".partial"):
            self._is_named = True


def fall_durable(step: int) -> None:
    rank, operation, what = TROUBLES.get(step, (-1, "", ""))
    if rank == collectives.rank() and operation == "durable":
        raise SystemExit(3) if what == "an exit" else OSError(errno.EIO, "no log today")


def train_with_trouble(output_dir: Path) -> tuple[list[int], list[str]]:
    """The steps whose checkpoints on_save reported to this rank, and the messages about the others."""
    saved: list[int] = []
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dalsegno").addHandler(handler)
    filesystem.watcher = Trouble()
    listener = Listener({"on_save": lambda ctx: saved.append(ctx.step)})
    notes = Notes(lambda call: fall_durable(call + 1))  # the save at step 2 does not get so far
    small_trainer(output_dir, notes, listener, max_steps=21, save_steps=1, max_failed_saves=100).train()
    return saved, messages


# --- one rank is gone -------------------------------------------------------------------------------------------------


def save_twice(directory: Path, watcher: Callable[[str, Path], None]) -> tuple[str, list[str]]:
    """Why the second save failed, as this rank knows it, and what the folder then contains."""
    manager, components = CheckpointManager(directory), [Component("callbacks.Notes", Notes())]
    manager.save(1, [], components)
    filesystem.watcher = watcher
    flight = manager.save_async(2, [], components)
    flight.wait()
    manager.settle()
    return str(flight.failure or ""), sorted(path.name for path in manager.directory.iterdir())


def save_while_one_is_killed(directory: Path, victim: int, operation: str, end: str) -> tuple[str, list[str]]:
    """By SIGKILL, when it comes to that operation of the second save; ``after``: of the first one behind it."""
    is_next = False

    def kill(what: str, path: Path) -> None:
        nonlocal is_next
        if collectives.rank() == victim and (is_next or (operation == what and path.name.endswith(end))):
            os.kill(os.getpid(), signal.SIGKILL)
        is_next = collectives.rank() == victim and operation == f"after {what}" and path.name.endswith(end)

    return save_twice(directory, kill)


def save_while_rank_one_is_killed_by_rank_zero(directory: Path, operation: str, end: str) -> tuple[str, list[str]]:
    """When rank 0 comes to that operation, which is not before rank 1 has reported what it has written."""
    pids: list[int] = collectives.gather(os.getpid(), "processes")

    def kill(what: str, path: Path) -> None:
        if collectives.rank() == 0 and operation == what and path.name.endswith(end):
            limit_background_group(seconds=8)  # one send in some hundreds does not see that its receiver has died
            os.kill(pids[1], signal.SIGKILL)
            until(lambda: "\nState:\tZ" in status(pids[1]))

    return save_twice(directory, kill)


def limit_background_group(seconds: int) -> None:
    collectives._TIMEOUT = collectives._ANSWER_TIMEOUT = timedelta(seconds=seconds)
    group: Any = collectives.background_group()._group
    distributed_c10d._set_pg_timeout(collectives._TIMEOUT, group())


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "\nState:\tZ"  # and buried


def save_while_one_is_stuck(directory: Path) -> tuple[str, list[str]]:
    """Rank 1 does not come to an end of its part until rank 0 has given up waiting for it."""
    gave_up = directory / "gave-up"

    def stick(call: int) -> None:
        if call == 2 and collectives.rank() == 1:
            until(gave_up.exists)

    manager, components = CheckpointManager(directory), [Component("callbacks.Notes", Notes(stick))]
    manager.save(1, [], components)
    limit_background_group(seconds=2)
    flight = manager.save_async(2, [], components)
    flight.wait()
    gave_up.touch()
    manager.settle()
    return str(flight.failure or ""), sorted(path.name for path in manager.directory.iterdir())


# --- what a callback has written --------------------------------------------------------------------------------------


class Diary(ds.Callback):
    """Appends a line each step to a file of each rank's own, and notes in its state how far that goes."""

    state_scope = "per_rank"

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"diary-{collectives.rank()}"
        self.path.touch()
        self._folder = folder

    def on_step_end(self, ctx: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{ctx.step}\n")

    def state_dict(self) -> dict[str, int]:
        return {"offset": self.path.stat().st_size}

    def load_state_dict(self, state: dict[str, int]) -> None: ...

    def make_durable(self) -> None:
        """On rank 1, not before rank 0 has written all that it writes without it."""
        if collectives.rank() == 1:
            until(lambda: any(self._folder.glob("checkpoints/*.partial/shared.json")))
        descriptor = os.open(self.path, os.O_RDONLY)
        filesystem.fsync(descriptor, self.path)
        os.close(descriptor)
        (self._folder / f"durable-{collectives.rank()}").touch()


def train_with_diaries(output_dir: Path) -> list[str]:
    """On rank 0: what was there of the durable diaries when something was written that counts on them."""
    events: list[str] = []
    output_dir.mkdir(exist_ok=True)

    def watch(operation: str, path: Path) -> None:
        if path.name == "manifest.json" and operation == "write":
            events.append(" ".join(sorted(each.name for each in output_dir.glob("durable-*"))))

    filesystem.watcher = watch
    small_trainer(output_dir, Diary(output_dir), max_steps=2, save_steps=2).train()
    return events


# --- how a run ends when saves fail -----------------------------------------------------------------------------------


def train_on_a_failing_disk(output_dir: Path, bad: frozenset[int], max_steps: int, abort_at: int | None) -> str:
    """Rank 1 cannot write its part of these steps' checkpoints; it requests to abort, too. How this rank's leg ends."""

    def full(operation: str, path: Path) -> None:
        if operation == "write" and any(f"step-{step:08d}.partial/rank-00001" in str(path) for step in bad):
            raise OSError(errno.ENOSPC, "No space left on device")

    def on_step_end(ctx: Any) -> None:
        if ctx.step == abort_at and collectives.rank() == 1:
            ctx.control.stop("seen enough", save=False)

    filesystem.watcher = full
    listener = Listener({"on_step_end": on_step_end})
    trainer = small_trainer(
        output_dir, Notes(), listener, max_steps=max_steps, save_steps=2, max_failed_saves=2, parallel="ddp"
    )
    try:
        result = trainer.train()
    except ds.SaveFailed as error:
        return f"{type(error).__name__} at step {trainer.state.global_step}: {error}"
    return f"{result.reason} at step {result.global_step}, with {result.checkpoint and result.checkpoint.name}"
