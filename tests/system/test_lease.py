"""A lock that expires: who takes over a run from another host, and what the former holder still does."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from checkpoint.remote.jobs import until
from checkpoint.remote.there import training
from dalsegno.system import filesystem, lease
from dalsegno.system.exit_status import ExitStatus, exit_status_of
from dalsegno.system.lock import DirectoryLock
from dalsegno.testing import FaultPlan, run_ranks, start_ranks
from support.hosts import be_taken_over, host_trainer, train_on_host
from support.listeners import Listener

OF_NODE_17 = {"host": "node-17", "pid": 4711, "since": 0.0, "token": "0123456789abcdef", "lives": {}, "lease": 0.2}


def entry(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / ".lock").read_text()))


def holder_of(run: Path) -> int:
    """Pid of the process that holds the run, once there is one."""
    until(lambda: (run / ".lock").exists() and (run / ".lock").stat().st_size > 0)
    return int(entry(run)["pid"])


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def tree(run: Path) -> dict[str, bytes]:
    """All files but ``.lease``: a process that was stopped in the middle of a renewal ends it when it runs again."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name != lease.LEASE]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def lease_files(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if path.name.startswith("."))


def test_a_live_holder_on_another_host_refuses(tmp_path: Path) -> None:
    run, end = tmp_path / "run", tmp_path / "end"
    first = start_ranks(train_on_host, 1, "node-1", run, 60.0, None, end)
    pid = holder_of(run)
    (second,) = run_ranks(train_on_host, 1, "node-2", run)
    assert re.fullmatch(
        rf"Locked: {run}: in use by process {pid} on node-1 since [-\d]+ [:\d]+, whose lease is held until "
        r"[-\d]+ [:\d]+ UTC; wait for it, stop it, or use another output_dir",
        second,
    ), second
    end.touch()
    assert first.wait()[0].value == "stopped"
    assert lease_files(run) == [".lock"]
    assert (run / ".lock").read_bytes() == b""


def test_the_lease_of_a_dead_host_expires(tmp_path: Path) -> None:
    """The run is then continued as if nothing had happened."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    plan = FaultPlan(operation="rename", path="step-00000006", count=1)
    [dead] = start_ranks(train_on_host, 1, "node-1", run, 0.2, plan).wait()
    assert dead.was_killed
    assert entry(run)["host"] == "node-1"
    assert run_ranks(train_on_host, 1, "node-2", run) == ["finished"]
    assert host_trainer(whole).train().reason == "finished"
    assert training(run / "logs/train.jsonl") == training(whole / "logs/train.jsonl")
    model = "checkpoints/step-00000012/model/shard-00000.safetensors"
    assert (run / model).read_bytes() == (whole / model).read_bytes()
    assert lease_files(run) == [".lock"]


@pytest.mark.parametrize(
    ("operation", "path", "count"),
    [("rename", "step-00000006", 1), ("write", "train.jsonl", 5), ("write", ".partial", 9), ("rename", "run.json", 3)],
)
def test_a_holder_that_was_stopped_writes_nothing_after_the_takeover(
    tmp_path: Path, operation: str, path: str, count: int
) -> None:
    """Stopped just before it publishes, logs, writes a checkpoint's file, or records its progress."""
    run = tmp_path / "run"
    plan = FaultPlan(operation=operation, path=path, count=count, sends=signal.SIGSTOP)
    first = start_ranks(train_on_host, 1, "node-1", run, 0.2, plan)
    pid = holder_of(run)
    until(lambda: is_stopped(pid))
    assert run_ranks(train_on_host, 1, "node-2", run) == ["finished"]
    before = tree(run)
    os.kill(pid, signal.SIGCONT)
    [end] = first.wait()
    assert end.value == (
        f"LeaseLost: {run}: was taken over by another process, which has ended since (or a link on its path "
        "leads elsewhere now): "
        "this process did not renew its lease for 0 s, or the other was started with take_over_lock=True; "
        "nothing more is written from here"
    )
    assert tree(run) == before


def test_two_that_take_over_at_once(tmp_path: Path) -> None:
    run, end = tmp_path / "run", tmp_path / "end"
    run.mkdir()
    (run / ".lock").write_text(json.dumps(OF_NODE_17))
    takers = [start_ranks(train_on_host, 1, f"node-{number}", run, 60.0, None, end) for number in (1, 2)]
    until(lambda: not all(taker.alive for taker in takers))
    end.touch()
    values = sorted(str(taker.wait()[0].value) for taker in takers)
    assert values[0].startswith(f"Locked: {run}: ") and values[1] == "stopped", values
    assert lease_files(run) == [".lock"]


def test_a_takeover_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    """It had won, and not written its own entry yet."""
    successor = {**OF_NODE_17, "token": "fedcba9876543210", "pid": 4712}
    (tmp_path / ".lock").write_text(json.dumps(OF_NODE_17))
    taking = lease._taking(lease.Holder.parse(json.dumps(OF_NODE_17).encode()))
    (tmp_path / taking).write_text(json.dumps(successor))
    with DirectoryLock(tmp_path):
        assert entry(tmp_path)["pid"] == os.getpid()
        assert lease_files(tmp_path) == [".lease", ".lock"]


def test_takeovers_that_lead_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(json.dumps(OF_NODE_17))
    taking = lease._taking(lease.Holder.parse(json.dumps(OF_NODE_17).encode()))
    (tmp_path / taking).write_text(json.dumps(OF_NODE_17))
    with pytest.raises(ds.Locked, match=rf"process 4711 on node-17 .* has just acquired it; .* delete {taking} there"):
        DirectoryLock(tmp_path).acquire()


def test_a_holder_that_is_late_succeeds_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspended, say, while no other process wanted the run."""
    monkeypatch.setattr(lease, "TTL_S", 0.0)
    tokens: list[str] = []
    listener = Listener({"on_step_end": lambda ctx: tokens.append(entry(tmp_path)["token"])})
    assert host_trainer(tmp_path, listener, max_steps=4).train().reason == "finished"
    assert len(set(tokens)) > 1
    assert lease_files(tmp_path) == [".lock"]
    assert (tmp_path / ".lock").read_bytes() == b""


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_end_when_another_process_has_taken_over(tmp_path: Path, ranks: int) -> None:
    ends = run_ranks(be_taken_over, ranks, tmp_path)
    for error, reasons in ends:
        assert error.startswith(f"{tmp_path}: was taken over by process ") and " on node-17 since " in error
        assert reasons == ["taken_over"]
    assert [record["global_step"] for record in training(tmp_path / "logs/train.jsonl")] == [1, 2]
    (leg,) = json.loads((tmp_path / "run.json").read_text())["legs"]
    assert leg["ended"] is None, "run.json is the other process's"
    assert entry(tmp_path)["token"] == "0123456789abcdef", "the other's entry stays"


@pytest.mark.parametrize("how", ["moved", "retargeted"])
def test_a_run_whose_path_leads_elsewhere_ends_and_writes_nothing_there(tmp_path: Path, how: str) -> None:
    real, link, elsewhere = tmp_path / "real", tmp_path / "link", tmp_path / "elsewhere"
    real.mkdir()
    elsewhere.mkdir()
    link.symlink_to(real)

    def lead_elsewhere(ctx: Any) -> None:
        if ctx.state.global_step == 3:
            if how == "moved":
                real.rename(tmp_path / "new place")
            else:
                link.unlink()
                link.symlink_to(elsewhere)

    output_dir, listener = real if how == "moved" else link, Listener({"on_step_end": lead_elsewhere})
    trainer = host_trainer(output_dir, listener, save_in_background=False)
    with pytest.raises(ds.LeaseLost, match=rf"^{real}: its .lock is gone: .*; resume the run where it is now"):
        trainer.train()
    run = tmp_path / "new place" if how == "moved" else real
    assert [*elsewhere.iterdir()] == [] and real.exists() == (how != "moved")
    assert host_trainer(run).train().reason == "finished"
    assert [record["global_step"] for record in training(run / "logs/train.jsonl")] == [*range(1, 13)]
    assert ds.open_log(run).legs()[1].from_checkpoint == "checkpoints/step-00000002"


def test_a_takeover_has_an_exit_status() -> None:
    assert exit_status_of(ds.LeaseLost("taken over")) == ExitStatus.TAKEN_OVER == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda path: filesystem.make_directory(path / "new"),
        lambda path: filesystem.replace_durably(path / "file", b"new"),
        lambda path: filesystem.write_direct(path / "file", iter(()), 0),
        lambda path: filesystem.rename(path / "file", path / "moved"),
        lambda path: filesystem.remove(path / "file"),
    ],
)
@pytest.mark.parametrize("through_link", [True, False])
def test_no_file_is_changed_without_the_lease(
    tmp_path: Path, change: Callable[[Path], object], through_link: bool
) -> None:
    """The other's temporary files included."""
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "link").symlink_to(run)
    place = tmp_path / "link" if through_link else run
    with DirectoryLock(place) as lock:
        for name in ("file", ".file.tmp"):
            (run / name).write_bytes(b"old")
        (run / ".lock").write_text(json.dumps(OF_NODE_17))
        with pytest.raises(ds.LeaseLost, match="process 4711 on node-17"):
            lock._lease.confirm()  # type: ignore[union-attr]
        before = tree(run)
        with pytest.raises(ds.LeaseLost):
            change(place)
        filesystem.replace_durably(tmp_path / "beside", b"new")
    assert tree(run) == before


def test_an_entry_of_a_former_version_never_expires(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(json.dumps({**OF_NODE_17, "lease": None}))
    with pytest.raises(ds.Locked, match=rf"this host \({socket.gethostname()}\) cannot see .*take_over_lock=True"):
        DirectoryLock(tmp_path).acquire()
    with DirectoryLock(tmp_path, take_over=True):
        pass


class Flaky:
    """Files in memory. While it is cut off, a write arrives, and its answer does not."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.is_cut_off = False

    def read(self, name: str) -> bytes | None:
        self._answer()
        return self.files.get(name)

    def write(self, name: str, data: bytes) -> None:
        self.files[name] = data
        self._answer()

    def create(self, name: str, data: bytes) -> bool:
        is_new = self.files.setdefault(name, data) is data
        self._answer()
        return is_new

    def delete(self, names: Iterable[str]) -> None:
        self._answer()
        for name in names:
            self.files.pop(name, None)

    def _answer(self) -> None:
        if self.is_cut_off:
            raise OSError("no answer")


def test_a_holder_that_was_cut_off_continues_unless_another_has_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "TTL_S", 1e-9)  # late each time
    monkeypatch.setattr(lease, "RENEW_S", 1e6)
    files = Flaky()
    held = lease.Lease(files, "there")
    held.acquire(None)
    for _ in range(2):
        files.is_cut_off = True
        with pytest.raises(OSError, match="no answer"):
            held.confirm()
        files.is_cut_off = False
        held.confirm()
        assert held.loss is None and not [name for name in files.files if "after" in name]
    files.is_cut_off = True
    with pytest.raises(OSError, match="no answer"):
        held.confirm()  # leaves the file of its own succession
    files.is_cut_off = False
    other = lease.Lease(files, "there")
    other.acquire(lease.read_holder(files))
    with pytest.raises(ds.LeaseLost, match="there: was taken over by process"):
        held.confirm()
    assert not held.release()
    assert other.release()
    assert [name for name in files.files if "after" in name] == []
