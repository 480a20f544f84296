"""A disk that refuses a write or an fsync: nothing that was acknowledged is lost, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dalsegno.diloco import DiLoCoServer, nesterov
from dalsegno.diloco.server.coordinator import Coordinator, Patience
from dalsegno.diloco.server.rounds import Applied, Joined, Left
from dalsegno.diloco.server.run import OuterRun
from dalsegno.diloco.wire.messages import FrameLayout, Settings, head_of_whole_frame
from dalsegno.errors import NotFound, NotRunning, SaveFailed
from dalsegno.logs import read_records
from dalsegno.system import durability, filesystem
from dalsegno.system.durability import NotDurable
from diloco.scenes import SPECS, Given, all_together, plain_rounds, rules, same, submission_of, train_by_hand, values


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dalsegno.diloco.server.coordinator._PAUSE", 0.01)


class Serving:
    """A server without network, with parameters and these workers."""

    def __init__(
        self, folder: Path, workers: int, num_fragments: int = 1, save_every: int = 100, *, begin: bool = True
    ) -> None:
        self.changed = threading.Event()
        self.run = OuterRun(folder, nesterov(), save_every)
        self.coordinator = Coordinator(self.run, rules(workers), self.changed.set)
        self.settings = Settings([spec.to_json() for spec in SPECS], num_fragments)
        if begin and not self.run.has_begun:
            self.begin(workers)

    def begin(self, workers: int = 1) -> None:
        with self.coordinator.spooled(SPECS, Given(SPECS, values(SPECS, 0))) as arrived:
            self.coordinator.initialize(arrived, self.settings.num_fragments)
        for number in range(workers):
            self.join(f"w{number}")

    def join(self, worker_id: str) -> None:
        self.coordinator.register(worker_id, self.settings, count=None, run_id=None, dylu=False)

    def submit(self, worker_id: str, number: int = 1) -> None:
        submission = submission_of(worker_id, number, number - 1)
        specs = self.coordinator.offer(submission)
        if specs is not None:
            with self.coordinator.spooled(specs, Given(specs, values(specs, number))) as arrived:
                self.coordinator.accept(submission, arrived)

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


@pytest.mark.parametrize("when", ["it begins", "a round", "a checkpoint"])
def test_a_server_whose_journal_may_be_lost_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """An fsync of its folder fails, once. Started again, in another process, the server continues."""
    lost: list[OSError] = []

    def lose(what: str, path: Path) -> None:
        if what == "fsync" and path == tmp_path / "diloco" and lost:
            raise lost.pop()

    monkeypatch.setattr(filesystem, "watcher", lose)
    server = Serving(tmp_path, 1, save_every=1, begin=when != "it begins")
    if when == "a round":
        server.coordinator.close()
        server = Serving(tmp_path, 1)  # which has written no event yet
    lost.append(OSError(errno.EIO, "Input/output error"))
    with suppress(NotDurable):
        if when == "it begins":
            server.begin()
        else:
            server.submit("w0")
    server.wait(lambda: server.coordinator.failure)
    assert isinstance(server.coordinator.failure, NotDurable)
    assert not lost
    with pytest.raises(NotRunning, match="restart it"):
        server.join("w0")
    server.coordinator.close()
    monkeypatch.setattr(durability, "_failures", {})
    again = Serving(tmp_path, 1)
    again.submit("w0")
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


class Full:
    """A disk without room for what a server does to files below a folder of this name, but for the first times."""

    def __init__(self, operation: str, folder: str, after: int = 0) -> None:
        self.reached = threading.Event()
        self._operation, self._folder, self._left = operation, folder, after

    def watch(self, what: str, path: Path) -> None:
        if what == self._operation and self._folder in path.parts:
            self._left -= 1
            if self._left < -1:  # and it was tried again
                self.reached.set()
            if self._left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "full",
    [
        lambda: Full("write", "versions"),
        lambda: Full("write", "versions", after=3),  # its head and a tensor are written
        lambda: Full("rename", "versions"),
        lambda: Full("write", "logs"),
    ],
    ids=["version", "rest of a version", "name of a version", "log"],
)
def test_a_round_waits_until_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: Callable[[], Full]
) -> None:
    """A download that has begun waits too, and then gets the rest."""
    server, disk = Serving(tmp_path, 1), full()
    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "watcher", disk.watch)
        server.submit("w0")
        assert disk.reached.wait(60)
        server.wait(lambda: server.coordinator.result("w0", 1))
        download, growth = server.coordinator.parameters(1, None)
        assert "No space left" in server.coordinator.status()["obstacle"]
        assert server.coordinator.failure is None
    assert asyncio.run(asyncio.wait_for(growth.beyond(growth.length - 1), 60)) == growth.length
    server.submit("w0", 2)  # and the next round
    server.wait(lambda: server.coordinator.result("w0", 2))
    assert server.coordinator.status()["obstacle"] is None
    with download:
        fetched = download.readall()
    server.coordinator.close()
    assert [each["global_step"] for each in read_records(tmp_path / "logs/train.jsonl")] == [1, 2]
    whole = tmp_path / "fetched"
    whole.write_bytes(fetched)
    assert head_of_whole_frame(whole) == {"version": 1}  # with its checksum


def test_why_a_write_waits_is_logged_every_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = [*range(0, 200, 25)]  # seconds
    refused = iter(attempts)

    def write() -> None:
        if (second := next(refused, None)) is not None:
            monkeypatch.setattr("dalsegno.diloco.server.coordinator.monotonic", lambda: second)
            raise OSError(errno.ENOSPC, "No space left on device", f"at {second}")

    patience = Patience()
    patience.insist(write)
    messages = [record.getMessage() for record in caplog.records]
    assert [each for each in messages if "No space left" in each and "Make room" in each] == messages[:-1]
    assert ["'at 0'" in messages[0], "'at 75'" in messages[1], "'at 150'" in messages[2]] == [True] * 3
    assert messages[3:] == ["the DiLoCo server can write again"]
    assert patience.obstacle is None


def read_only(folder: Path, patch: pytest.MonkeyPatch) -> None:
    def refuse(what: str, path: Path) -> None:
        if what == "write" and path.parent == folder:
            raise OSError(errno.EROFS, "Read-only file system")

    patch.setattr(filesystem, "watcher", refuse)


def gone(folder: Path, patch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("make", [read_only, gone])
def test_what_does_not_pass_by_itself_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path, pytest.MonkeyPatch], None]
) -> None:
    server = Serving(tmp_path, 1)
    with monkeypatch.context() as patch:
        make(tmp_path / "diloco/versions", patch)
        server.submit("w0")
        server.wait(lambda: server.coordinator.failure)
        with pytest.raises(NotRunning, match=r"(Read-only|No such file).*restart it"):
            server.submit("w0", 2)
        server.coordinator.close()
    again = Serving(tmp_path, 1)
    again.wait(lambda: again.coordinator.result("w0", 1))
    again.coordinator.parameters(1, None)[0].close()
    again.coordinator.close()


@pytest.mark.parametrize("place", ["state", "second version"])
def test_no_download_waits_for_a_step_that_found_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Two versions are to be announced, a fragment and the whole; a checkpoint is due."""
    server = Serving(tmp_path, 1, num_fragments=2, save_every=1)
    server.join("w1")
    layouts = iter([FrameLayout])

    def fail(*_: object) -> object:
        raise MemoryError

    if place == "state":
        monkeypatch.setattr(OuterRun, "state_to_save", fail)
    else:
        monkeypatch.setattr("dalsegno.diloco.server.files.FrameLayout", lambda *given: next(layouts, fail)(*given))
    server.submit("w0")
    server.wait(lambda: server.coordinator.failure)
    for fragment in (0, None):
        with pytest.raises(NotFound):
            server.coordinator.parameters(1, fragment)
    server.coordinator.close()


def test_downloads_of_a_version_that_is_not_written_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions are begun, a fragment and the whole, and the server closes while the disk is full."""
    server, disk = Serving(tmp_path, 1, num_fragments=2), Full("write", "versions")
    server.join("w1")  # begins with the next version
    monkeypatch.setattr(filesystem, "watcher", disk.watch)
    server.submit("w0")
    assert disk.reached.wait(60)
    server.wait(lambda: server.coordinator.result("w0", 1))
    file, growth = server.coordinator.parameters(1, None)
    file.close()
    server.coordinator.close()
    monkeypatch.undo()
    assert not list((tmp_path / "diloco/versions").glob("00000001*"))
    with pytest.raises(EOFError):
        asyncio.run(asyncio.wait_for(growth.beyond(0), 60))
    again = Serving(tmp_path, 1)
    again.coordinator.parameters(1, None)[0].close()
    again.coordinator.close()


def test_a_disk_that_is_often_full_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any write of the server may be refused: it lives, its workers try again, and nothing is lost or counted twice."""
    monkeypatch.setattr("dalsegno.diloco.worker.exchange.retry_delay", lambda attempt: 0.0)
    chance, refused = random.Random(0), set[str]()

    def refuse(what: str, path: Path) -> None:
        if what == "write" and (path.parent.name not in refused or chance.random() < 0.3):
            refused.add(path.parent.name)
            raise OSError(errno.ENOSPC, "No space left on device")

    with DiLoCoServer(tmp_path, 2, rules=rules(2, save_every=2)) as server:
        monkeypatch.setattr(filesystem, "watcher", refuse)
        models = all_together(
            [
                lambda number=number: train_by_hand(
                    server, number, 20, sync_every=4, bf16_comm=False, max_sync_retries=1000
                )
                for number in range(2)
            ]
        )
        monkeypatch.setattr(filesystem, "watcher", None)
    assert all(same(model, plain_rounds(2, 5, 4, nesterov())) for model in models)
    assert [each["global_step"] for each in read_records(tmp_path / "logs/train.jsonl")] == [1, 2, 3, 4, 5]
    assert refused >= {"diloco", "submissions", "versions", "logs"}


def test_after_an_outer_step_that_failed_nothing_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event may be on disk, committed by another thread during the step; another one must not get its number."""
    run = OuterRun(tmp_path, nesterov(), 100)
    with run.spooled(SPECS, Given(SPECS, values(SPECS, 0))) as arrived:
        run.begin(arrived)
    run.record(Joined("w0", 0, 0, False))
    with run.spooled(SPECS, Given(SPECS, values(SPECS, 1))) as arrived:
        run.accept(submission_of("w0", 1, 0), arrived)
        run.commit()

    def fail() -> None:
        run.commit()
        raise MemoryError

    monkeypatch.setattr(run._optimizer, "step", fail)
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
