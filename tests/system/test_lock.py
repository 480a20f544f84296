"""Two at once: one run, one live process, in a folder that all its ranks share."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dalsegno.errors import ConfigurationError, Locked, RankFailed
from dalsegno.events.table import Event
from dalsegno.system.lease import Holder
from dalsegno.system.lock import DirectoryLock
from dalsegno.testing import FaultPlan, run_ranks, start_ranks
from support.listeners import Listener
from support.small import small_trainer
from support.stopping import train_and_leave_a_worker, train_in_folders, train_until

SINCE = time.mktime((2026, 11, 21, 4, 5, 6, 0, 0, -1))


def leave_lock(directory: Path, **entry: Any) -> None:
    """As a process of another host has left it."""
    holder = {"host": "node-17", "pid": 4711, "since": SINCE, "token": "0123456789abcdef", "lives": {}}
    directory.mkdir(exist_ok=True)
    (directory / ".lock").write_text(json.dumps(holder | entry))


def test_no_other_user_can_lock_it(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch(0o644)  # as a former version left it
    with DirectoryLock(tmp_path):
        assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600


def test_the_user_whose_lock_it_is_is_named() -> None:
    """Root may open every file, so here root becomes nobody for a moment."""
    with tempfile.TemporaryDirectory() as name:
        folder, lock, is_root = Path(name), Path(name) / ".lock", os.geteuid() == 0
        lock.touch(0o600 if is_root else 0)
        folder.chmod(0o777)
        if is_root:
            os.seteuid(65534)
        try:
            with pytest.raises(Locked, match=f"user {lock.owner()} has trained here, and alone may open"):
                DirectoryLock(folder).acquire()
        finally:
            if is_root:
                os.seteuid(0)


def test_a_program_that_names_nobody_is_told_apart(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path):
        pass
    stranger = "import fcntl, sys; f = open(sys.argv[1]); fcntl.lockf(f, fcntl.LOCK_SH); print(flush=True); input()"
    words = [sys.executable, "-c", stranger, str(tmp_path / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        with pytest.raises(Locked, match=r"has not written its name .* 'lslocks'"):
            DirectoryLock(tmp_path).acquire()
        process.communicate(b"\n")


def test_a_process_of_another_host_counts_until_it_is_known_to_be_dead(tmp_path: Path) -> None:
    leave_lock(tmp_path)
    with pytest.raises(Locked) as caught:
        small_trainer(tmp_path, max_steps=1).train()
    assert str(caught.value) == (
        f"{tmp_path}: in use by process 4711 on node-17 since 2026-11-21 04:05:06, and this host "
        f"({socket.gethostname()}) cannot see whether that process is alive; if it is not, delete .lock there, "
        "or train with TrainingArguments(take_over_lock=True) once"
    )
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert small_trainer(tmp_path, max_steps=1, take_over_lock=True).train().reason == "finished"
    assert small_trainer(tmp_path, max_steps=2).train().reason == "finished", "once is enough"


@pytest.mark.parametrize("kind", ["slurm", "torchrun"])
def test_a_former_life_of_the_same_job_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Requeued by Slurm, or started again by torchrun, on another host than before."""
    job, life = {
        "slurm": ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
        "torchrun": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    }[kind]
    lives = {kind: ["77", 0]}
    monkeypatch.setenv(job, "77")
    leave_lock(tmp_path, lives=lives)
    with pytest.raises(Locked, match="on node-17"):
        small_trainer(tmp_path, max_steps=1).train()  # the same life: rank 0 cannot be on two hosts
    monkeypatch.setenv(life, "1")
    assert small_trainer(tmp_path, max_steps=1).train().reason == "finished"
    for other in ({kind: ["78", 0]}, {kind: ["77", 1]}, {kind: ["77", 2]}):
        leave_lock(tmp_path, lives=other)
        with pytest.raises(Locked, match="on node-17"):
            small_trainer(tmp_path, max_steps=2).train()


def test_torchruns_name_for_jobs_without_one_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    leave_lock(tmp_path, lives={"torchrun": ["none", 0]})
    with pytest.raises(Locked, match="on node-17"):
        small_trainer(tmp_path, max_steps=1).train()


def test_a_process_that_was_killed_here_holds_nothing(tmp_path: Path) -> None:
    """Though its name is still in the file."""
    plan = FaultPlan(event=Event.STEP_BEGIN, count=3)
    [outcome] = start_ranks(train_until, 1, tmp_path, plan).wait()
    assert outcome.was_killed
    assert json.loads((tmp_path / ".lock").read_text())["host"] == socket.gethostname()
    assert not DirectoryLock.is_held(tmp_path)
    run_ranks(train_until, 1, tmp_path, None)


@pytest.mark.parametrize("ends_well", [True, False])
def test_whoever_leaves_takes_the_name_along(tmp_path: Path, ends_well: bool) -> None:
    def look(ctx: Any) -> None:
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
        if not ends_well:
            raise OSError("broken")

    trainer = small_trainer(tmp_path, Listener({"on_before_load": look}), max_steps=1)
    with contextlib.nullcontext() if ends_well else pytest.raises(OSError, match="broken"):
        trainer.train()
    assert (tmp_path / ".lock").read_bytes() == b""


@pytest.mark.parametrize("content", ["", "no JSON", "[]", '{"host": 3}', '{"host": "a", "pid": "x", "since": 0}'])
def test_a_file_that_says_nothing_keeps_nobody_out(tmp_path: Path, content: str) -> None:
    (tmp_path / ".lock").write_text(content)
    assert small_trainer(tmp_path, max_steps=1).train().reason == "finished"


def test_a_disk_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There it counts whether the process that the file names is alive."""

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    for lock in ("fcntl", "flock"):
        monkeypatch.setattr(fcntl, lock, refuse)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        leave_lock(tmp_path, host=socket.gethostname(), pid=other.pid)
        with pytest.raises(Locked, match=f"in use by process {other.pid} on "):
            small_trainer(tmp_path, max_steps=1).train()
    finally:
        other.kill()
        other.wait()
    assert not DirectoryLock.is_held(tmp_path)
    leave_lock(tmp_path, host=socket.gethostname(), pid=os.getpid())  # of a container that is gone: numbers come again
    assert small_trainer(tmp_path, max_steps=1).train().reason == "finished"


def leave_lock_of_this_pid(directory: Path, **changed: Any) -> None:
    """As an earlier process with this one's pid has left it, which this process would have seen but for ``changed``."""
    leave_lock(directory, **(asdict(Holder.here()) | {"since": SINCE} | changed))


def test_a_container_that_is_started_again_does_not_wait_where_the_kernel_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is the same one, and knows that the former process is dead. Elsewhere the lease decides."""
    leave_lock_of_this_pid(tmp_path, pid_namespace="pid:[1]")
    assert small_trainer(tmp_path, max_steps=1).train().reason == "finished"

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    for lock in ("fcntl", "flock"):
        monkeypatch.setattr(fcntl, lock, refuse)
    leave_lock_of_this_pid(tmp_path, pid_namespace="pid:[1]")
    with pytest.raises(Locked, match=f"process {os.getpid()} in another container on .* cannot see whether"):
        small_trainer(tmp_path, max_steps=2).train()
    leave_lock_of_this_pid(tmp_path)
    assert small_trainer(tmp_path, max_steps=2).train().reason == "finished"


def test_another_boot_may_be_another_host_of_the_same_name(tmp_path: Path) -> None:
    """Its kernel may lock the same disk without knowledge of this one."""
    leave_lock_of_this_pid(tmp_path, boot="another")
    with pytest.raises(Locked, match="cannot see whether that process is alive"):
        small_trainer(tmp_path, max_steps=1).train()


def test_a_copy_of_the_folder_leaves_it_locked(tmp_path: Path) -> None:
    """To open the lock's file in the very process that holds it, and to close it again, is what a copy does."""
    run, held = tmp_path / "run", []

    def copy(ctx: Any) -> None:
        shutil.copytree(run, tmp_path / f"copy-{ctx.state.global_step}")
        with pytest.raises(RankFailed, match=f"Locked: {run}: in use by process {os.getpid()} on "):
            run_ranks(train_until, 1, run, None)
        held.append(DirectoryLock.is_held(run))

    small_trainer(run, Listener({"on_step_begin": copy}), max_steps=1).train()
    assert held == [True]
    assert not DirectoryLock.is_held(run)


def test_a_worker_that_outlives_its_trainer_holds_nothing(tmp_path: Path) -> None:
    """Forked from it, as workers of data loaders are: all that was open there is open here too."""
    os.mkfifo(tmp_path / "end")
    [outcome] = start_ranks(train_and_leave_a_worker, 1, tmp_path / "run", tmp_path / "end").wait()
    assert outcome.was_killed
    worker = int((tmp_path / "run/worker").read_text())
    try:
        assert not DirectoryLock.is_held(tmp_path / "run")
        assert small_trainer(tmp_path / "run", max_steps=1).train().reason == "finished"
    finally:
        os.kill(worker, signal.SIGKILL)  # it has lived till now


def test_a_worker_that_ends_takes_nothing_along(tmp_path: Path) -> None:
    """Not the lock, and not the name in its file, though it leaves the block that holds both."""
    with contextlib.suppress(_Forked), DirectoryLock(tmp_path):
        if (worker := os.fork()) == 0:
            raise _Forked
        assert os.waitpid(worker, 0)[1] == 0
        assert DirectoryLock.is_held(tmp_path)
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
        return
    os._exit(0)


class _Forked(Exception):
    """Leads a forked process out of what its parent is in."""


def test_where_open_files_cannot_be_locked_flock_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS, old kernels, some sandboxes."""

    def unknown(*args: Any) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", unknown)
    with DirectoryLock(tmp_path):
        shutil.copytree(tmp_path, tmp_path / "copy")
        assert DirectoryLock.is_held(tmp_path)
        if (other := os.fork()) == 0:
            with contextlib.suppress(Locked):
                DirectoryLock(tmp_path).acquire()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(other, 0)[1] == 0, "the folder was given to a second process"
    with DirectoryLock(tmp_path):
        pass


@pytest.mark.parametrize("there", [True, False])
def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path, there: bool) -> None:
    mine, run = tmp_path / "thesis.txt", tmp_path / "run"
    run.mkdir()
    if there:
        mine.write_text("three years of work")
    (run / ".lock").symlink_to(mine)
    assert not DirectoryLock.is_held(run)
    with pytest.raises(
        ConfigurationError, match=r"this is a symbolic link, which is not followed; remove it, .*\.lock'"
    ):
        small_trainer(run, max_steps=1).train()
    assert not there or mine.read_text() == "three years of work"
    assert mine.exists() == there
    assert [path.name for path in run.iterdir()] == [".lock"]


def test_hosts_that_do_not_share_the_folder(tmp_path: Path) -> None:
    """As two ranks see it whose folders have one name, each on a disk of its own."""
    text = f"output_dir={str(tmp_path / '0')!r}: what rank 0 on {socket.gethostname()} has written there is not seen "
    for error in run_ranks(train_in_folders, 2, tmp_path / "0", tmp_path / "1"):
        assert re.match(re.escape(text).replace("0'", r"[01]'"), error), error
        assert f"by rank 1 on {socket.gethostname()}; name the same folder on all ranks" in error
    assert (tmp_path / "0/.lock").read_bytes() == b""
    assert run_ranks(train_in_folders, 2, tmp_path / "0", tmp_path / "0") == ["finished"] * 2


def test_a_folder_that_is_seen_late(tmp_path: Path) -> None:
    """A network disk may take its time until a host sees what another has written."""
    late = tmp_path / "late"
    first, second = run_ranks(train_in_folders, 2, tmp_path / "0", late, True)
    assert first == second == "finished"
