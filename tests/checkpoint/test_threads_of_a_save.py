"""Threads of a background save: which of them give way to training, and that none outlives a failure."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import xxhash
from torch import nn

from dalsegno.checkpoint import Checkpoint, CheckpointManager, ModelState, async_save, file_writing, read_tensors
from dalsegno.checkpoint.file_writing import checksum_beside
from dalsegno.errors import SaveFailed
from dalsegno.system import filesystem


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def own_threads() -> set[threading.Thread]:
    """Threads that run; not those that are being started, which cannot be joined."""
    return {each for each in threading.enumerate() if each.name.startswith("dalsegno") and each.ident is not None}


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


def large_and_then_small() -> nn.Module:
    """33 MB, which is copied in several pieces."""
    model = nn.Module()
    model.register_buffer("large", torch.randn(8 << 20))
    model.register_buffer("small", torch.randn(300))
    return model


def test_what_is_copied_is_written_before_the_rest_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is written has the values of the call."""
    is_being_written = threading.Event()
    copy_small = torch._foreach_copy_

    def copy_once_written(*tensors: object) -> None:
        assert is_being_written.wait(30), "nothing is written before everything is copied"
        copy_small(*tensors)  # type: ignore[arg-type]

    def watch(operation: str, path: Path) -> None:
        if operation == "write" and path.name == "shard-00000.safetensors":
            is_being_written.set()

    monkeypatch.setattr(torch, "_foreach_copy_", copy_once_written)
    monkeypatch.setattr(filesystem, "watcher", watch)
    model = large_and_then_small()
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    save = CheckpointManager(tmp_path).save_async(1, [ModelState(model)], [])
    for each in model.buffers():
        each.zero_()  # as training may
    save.join()
    assert save.failure is None
    checkpoint = Checkpoint.open(save.path)
    checkpoint.verify(checkpoint.manifest.files)
    read = read_tensors(checkpoint)["model"]
    assert all(torch.equal(read[name], each) for name, each in expected.items())


def test_the_copy_waits_for_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the processors busy: beside those of two ranks, the first write came 20 ms later."""
    is_copied = threading.Event()
    is_first: list[bool] = []
    copy = torch._foreach_copy_

    def copy_small(*tensors: object) -> None:
        is_copied.set()
        copy(*tensors)  # type: ignore[arg-type]

    def watch(operation: str, path: Path) -> None:
        if operation == "mkdir" and path.name == "step-00000001.partial":
            is_first.append(not is_copied.wait(0.3))

    monkeypatch.setattr(async_save, "_HEAD_START", 30.0)
    monkeypatch.setattr(torch, "_foreach_copy_", copy_small)
    monkeypatch.setattr(filesystem, "watcher", watch)
    save = CheckpointManager(tmp_path).save_async(1, [ModelState(nn.Linear(300, 300))], [])
    save.join()
    assert save.failure is None
    assert is_first == [True]


def test_training_does_not_wait_for_a_disk_that_is_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_back = threading.Event()

    def stuck(operation: str, path: Path) -> None:
        if operation == "mkdir" and path.name == "step-00000001.partial":
            assert is_back.wait(30)

    monkeypatch.setattr(filesystem, "watcher", stuck)
    save = CheckpointManager(tmp_path).save_async(1, [ModelState(large_and_then_small())], [])
    assert not save.done
    is_back.set()
    save.join()
    assert save.failure is None


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()])
def test_a_copy_that_fails_fails_the_save_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*tensors: object) -> None:
        raise error

    before = own_threads()
    manager, state = CheckpointManager(tmp_path), ModelState(large_and_then_small())
    with monkeypatch.context() as patched, pytest.raises(type(error)):
        patched.setattr(torch, "_foreach_copy_", fail)
        manager.save_async(1, [state], [])
    while left := own_threads() - before:  # one may have started another
        for thread in left:
            thread.join(30)
            assert not thread.is_alive()
    assert not list(manager.directory.iterdir())
    manager.save(2, [state], [])
    assert [path.name for path in manager.directory.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("name", ["shared.json", "shard-00000.safetensors", "manifest.json"])
def test_a_flush_that_the_disk_refuses_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == name:
            raise OSError(errno.EIO, "bad disk")
        fsync(descriptor)

    manager, state = CheckpointManager(tmp_path), ModelState(nn.Linear(300, 300))
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(SaveFailed, match=rf"bad disk: .*{name}"):
        manager.save(1, [state], [])
    assert not list(manager.directory.iterdir())


def test_the_thread_that_hashes_gives_way_to_training() -> None:
    priorities: list[int] = []

    def blocks() -> Iterator[memoryview]:
        for number in range(3):
            priorities.append(priority())
            yield memoryview(bytes([number]) * 5)

    with checksum_beside(blocks()) as checksum:
        assert checksum.wait() == xxhash.xxh3_128_hexdigest(b"\0" * 5 + b"\1" * 5 + b"\2" * 5)
    assert priorities == [19] * 3


def test_a_thread_that_gets_no_processor_time_is_relieved(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lowest priority, a save of 500 MB waited 2 to 5 s for its checksum beside 15 busy processes."""
    is_relieved = threading.Event()
    monkeypatch.setattr(file_writing, "lower_thread_priority", lambda by: is_relieved.wait(30))
    with checksum_beside(memoryview(bytes([number]) * 5) for number in range(3)) as checksum:
        found = checksum.finish()
        assert not is_relieved.is_set()
        is_relieved.set()
    assert found == xxhash.xxh3_128_hexdigest(b"\0" * 5 + b"\1" * 5 + b"\2" * 5)


@pytest.mark.parametrize("is_relieved", [False, True])
def test_blocks_that_fail_have_no_checksum(is_relieved: bool) -> None:
    def blocks() -> Iterator[memoryview]:
        yield memoryview(b"x")
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"), checksum_beside(blocks()) as checksum:
        checksum.finish() if is_relieved else checksum.wait()


# --- without a copy: live tensors are written, block by block ---------------------------------------------------------

PIECE = 2 * filesystem.PAGE


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "DIRECT_PIECE", PIECE)


def eighty_blocks() -> ModelState:
    model = nn.Module()
    model.register_buffer("it", torch.randint(255, (80 * PIECE,), dtype=torch.uint8))
    return ModelState(model)


@pytest.mark.usefixtures("small_blocks")
def test_a_block_is_copied_while_the_one_before_is_written_and_replaced_once_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds two blocks: while the third is written, all of the fourth is copied, and nothing of the fifth."""
    written, copied = 0, 0  # blocks that are being written or are; bytes
    while_third_is_written: list[int] = []

    def copy(place: torch.Tensor, raw: torch.Tensor, copy: Callable[..., None] = file_writing._copy) -> None:
        nonlocal copied
        copy(place, raw)
        copied += len(raw)

    def watch(operation: str, path: Path) -> None:
        nonlocal written
        if operation == "write" and path.name == "shard-00000.safetensors":
            written += 1
            if written == 3:
                until = time.monotonic() + 30
                while copied < 4 * PIECE and time.monotonic() < until:
                    time.sleep(0.001)
                time.sleep(0.1)  # for a copy that should not come
                while_third_is_written.append(copied)

    monkeypatch.setattr(file_writing, "_copy", copy)
    monkeypatch.setattr(filesystem, "watcher", watch)
    path = CheckpointManager(tmp_path).save(1, [eighty_blocks()], [])
    assert while_third_is_written == [4 * PIECE]
    checkpoint = Checkpoint.open(path)
    checkpoint.verify(checkpoint.manifest.files)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("what", ["write", "copy", "checksum"])
def test_a_stream_that_fails_half_way_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Whichever thread fails while the other waits for it."""
    calls: Counter[str] = Counter()

    def call(of: str) -> None:
        calls[of] += 1
        if of == what and calls[of] == 6:
            raise OSError(errno.EIO, f"no more of it: {what}")

    def watch(operation: str, path: Path) -> None:
        if operation == "write" and path.name == "shard-00000.safetensors":
            call("write")

    def copy(*arguments: torch.Tensor, copy: Callable[..., None] = file_writing._copy) -> None:
        call("copy")
        copy(*arguments)

    before = own_threads()
    manager = CheckpointManager(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(filesystem, "watcher", watch)
        patched.setattr(file_writing, "_copy", copy)
        patched.setattr(
            xxhash, "xxh3_128", lambda: SimpleNamespace(update=lambda block: call("checksum"), hexdigest=lambda: "")
        )
        with pytest.raises(SaveFailed, match=f"no more of it: {what}"):
            manager.save(1, [eighty_blocks()], [])
    assert calls[what] == 6
    assert not own_threads() - before
    assert not list(manager.directory.iterdir())


# --- endings ----------------------------------------------------------------------------------------------------------


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
    opened = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert not [path for path in opened if path.is_relative_to(tmp_path)]
    monkeypatch.setattr(filesystem, "watcher", None)
    manager.save(2, [state], [])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
