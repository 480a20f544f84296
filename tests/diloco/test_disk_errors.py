"""A disk that refuses a write or an fsync: nothing that was acknowledged is lost, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.diloco import nesterov
from dalsegno.diloco.coordinator import Coordinator
from dalsegno.diloco.run import OuterRun
from dalsegno.diloco.state import Applied, Joined, Left, Settings
from dalsegno.errors import NotRunning, SaveFailed
from dalsegno.system import filesystem
from dalsegno.web.growth import Growth
from diloco.scenes import SPECS, Given, rules, submission_of, values


class Serving:
    """A server without network, with parameters and these workers."""

    def __init__(self, folder: Path, workers: int, num_fragments: int = 1) -> None:
        self.changed = threading.Event()
        self.run = OuterRun(folder, nesterov(), 100)
        self.coordinator = Coordinator(self.run, rules(workers), self.changed.set)
        self.settings = Settings([spec.to_json() for spec in SPECS], num_fragments)
        if not self.run.has_begun:
            with self.coordinator.spooled(SPECS, Given(SPECS, values(SPECS, 0))) as arrived:
                self.coordinator.initialize(arrived, num_fragments)
            for number in range(workers):
                self.join(f"w{number}")

    def join(self, worker_id: str) -> None:
        self.coordinator.register(worker_id, self.settings, count=None, run_id=None, dylu=False)

    def submit(self, worker_id: str) -> None:
        specs = self.coordinator.offer(submission_of(worker_id, 1, 0))
        if specs is not None:
            with self.coordinator.spooled(specs, Given(specs, values(specs, 1))) as arrived:
                self.coordinator.accept(submission_of(worker_id, 1, 0), arrived)

    def wait(self, until: Callable[[], object]) -> None:
        while not until():
            assert self.changed.wait(60)
            self.changed.clear()


def test_a_submission_whose_fsync_failed_is_never_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports lost pages once; another fsync of the same file would return."""
    lost = [OSError(errno.EIO, "Input/output error")]

    def lose(what: str, path: Path) -> None:
        if what == "fsync" and path.name.startswith("w0-") and lost:
            raise lost.pop()

    server = Serving(tmp_path, 2)
    monkeypatch.setattr(filesystem, "watcher", lose)
    with pytest.raises(OSError, match="fsync failed: Input/output error"):
        server.submit("w0")
    with pytest.raises(OSError, match="fsync failed"):  # as if the answer had been lost
        server.submit("w0")
    with pytest.raises(NotRunning, match="restart it"):
        server.submit("w1")
    server.coordinator.close()
    assert not lost
    assert "accepted" not in (tmp_path / "diloco/journal.jsonl").read_text()
    again = Serving(tmp_path, 2)
    for worker_id in ("w0", "w1"):
        again.submit(worker_id)
    again.wait(lambda: again.coordinator.result("w0", 1))
    again.coordinator.close()


def refuse_journal(on_outer_thread: Callable[[], object] = lambda: None) -> Callable[[str, Path], None]:
    def refuse(what: str, path: Path) -> None:
        if what == "write" and path.name == "journal.jsonl":
            if threading.current_thread().name == "dalsegno-diloco-outer":
                on_outer_thread()
            raise OSError(errno.ENOSPC, "No space left on device")

    return refuse


def test_a_round_waits_until_its_events_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, server = threading.Event(), Serving(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "watcher", refuse_journal(refused.set))
        for worker_id in ("w0", "w1"):
            with pytest.raises(OSError, match="No space left"):
                server.submit(worker_id)
        assert refused.wait(60)
        assert server.coordinator.result("w0", 1) is None
    server.wait(lambda: server.coordinator.result("w0", 1))
    assert server.coordinator.failure is None
    server.coordinator.close()
    assert (tmp_path / "checkpoints/step-00000001").exists()


def test_a_server_that_ends_with_a_full_disk_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, server = threading.Event(), Serving(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "watcher", refuse_journal(refused.set))
        with pytest.raises(OSError, match="No space left"):
            server.submit("w0")
        assert refused.wait(60)
        with pytest.raises(SaveFailed, match="the journal cannot be written"):
            server.coordinator.close()
    again = Serving(tmp_path, 1)
    assert again.run.state.version == 0
    again.submit("w0")
    again.wait(lambda: again.coordinator.result("w0", 1))
    again.coordinator.close()


def test_downloads_of_a_version_that_is_not_written_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions are begun, a fragment and the whole, of which the first cannot be written."""
    server = Serving(tmp_path, 1, num_fragments=2)
    server.join("w1")  # begins with the next version
    downloads: list[Growth] = []

    def refuse(what: str, path: Path) -> None:
        if what == "write" and path.parent.name == "versions":
            file, growth = server.coordinator.parameters(1, None)
            file.close()
            downloads.append(growth)
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(filesystem, "watcher", refuse)
    server.submit("w0")
    server.wait(lambda: server.coordinator.failure)
    monkeypatch.undo()
    server.coordinator.close()
    (growth,) = downloads
    with pytest.raises(EOFError):
        asyncio.run(asyncio.wait_for(growth.beyond(0), 60))
    again = Serving(tmp_path, 1)
    again.coordinator.parameters(1, None)[0].close()
    again.coordinator.close()


def test_after_an_outer_step_that_failed_nothing_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event may be on disk, committed by another thread during the step; another one must not get its number."""
    run = OuterRun(tmp_path, nesterov(), 100)
    with run.store.spooled(SPECS, Given(SPECS, values(SPECS, 0))) as arrived:
        run.begin(arrived)
    run.record(Joined("w0", 0, 0, False))
    with run.store.spooled(SPECS, Given(SPECS, values(SPECS, 1))) as arrived:
        run.accept(submission_of("w0", 1, 0), arrived)
        run.commit()

    def fail() -> None:
        run.commit()
        raise MemoryError

    monkeypatch.setattr(run._globals.optimizer, "step", fail)
    with pytest.raises(MemoryError):
        run.record(Applied(["w0"], {}))
    run.record(Left("w0"))
    with pytest.raises(NotRunning):
        run.commit()
    run.close(save=False)
    again = OuterRun(tmp_path, nesterov(), 100)
    assert again.state.version == 1
    assert not again.state.members["w0"].has_left
    again.close(save=False)
