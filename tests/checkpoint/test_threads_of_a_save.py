"""Threads of a background save: which of them give way to training, and that none outlives a failure."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from torch import nn

from dalsegno.checkpoint import CheckpointManager, ModelState
from dalsegno.checkpoint.save.checksum import checksum_beside
from dalsegno.system import filesystem


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("dalsegno")}


def test_the_thread_that_writes_has_the_priority_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lowest one, a save of 1 GB took 55 s beside training on a machine that others kept busy; now 1.6 s."""
    priorities: dict[str, int] = {}

    def watch(operation: str, path: Path) -> None:
        priorities.setdefault(f"{operation} {path.name}", priority())

    monkeypatch.setattr(filesystem, "watcher", watch)
    manager = CheckpointManager(tmp_path)
    save = manager.save_async(1, [ModelState(nn.Linear(300, 300))], [])
    save.join()
    assert save.failure is None
    assert priorities["write shard-00000.safetensors"] == priorities["rename step-00000001"] == priority()


def test_the_thread_that_hashes_gives_way_to_training() -> None:
    priorities: list[int] = []

    def blocks() -> Iterator[memoryview]:
        for number in range(3):
            priorities.append(priority())
            yield memoryview(bytes([number]) * 5)

    with checksum_beside(blocks()) as checksum:
        assert checksum.result() == xxhash.xxh3_128_hexdigest(b"\0" * 5 + b"\1" * 5 + b"\2" * 5)
    assert priorities == [19] * 3


def test_no_thread_hashes_on_after_a_failure() -> None:
    def fail() -> None:
        with checksum_beside(memoryview(b"x") for _ in itertools.count()):  # endless
            raise OSError("full")

    before = own_threads()
    with pytest.raises(OSError, match="full"):
        fail()
    assert not own_threads() - before


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_fails_the_save_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    def full(operation: str, path: Path) -> None:
        if operation == "write" and path.name == "shard-00000.safetensors":
            raise OSError(errno.ENOSPC, "no room", str(path))

    before = own_threads()
    manager, state = CheckpointManager(tmp_path), ModelState(nn.Linear(300, 300))
    monkeypatch.setattr(filesystem, "watcher", full)
    save = manager.save_async(1, [state], [], background=background)
    save.join()
    assert "no room" in str(save.failure)
    assert not own_threads() - before
    monkeypatch.setattr(filesystem, "watcher", None)
    manager.save(2, [state], [])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
