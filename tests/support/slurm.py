"""A private Slurm cluster of one host: controller and node on loopback, with a configuration of their own.

Three partitions share the node; in ``plain`` two jobs may run at once. A job in ``urgent`` preempts those in the
others, which go back into the queue: in ``patient`` after a minute's grace, in ``plain`` at once.
"""

from __future__ import annotations

import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue", "sinfo")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None]
PATIENCE = 180.0  # seconds, on a busy machine

CONFIGURATION = """
ClusterName=private
SlurmctldHost=localhost
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
# The least that Slurm takes: how many seconds a job that is requeued has to wait.
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=30
SlurmdParameters=config_overrides
NodeName=localhost CPUs=4
PartitionName=plain Nodes=localhost PriorityTier=1 OverSubscribe=FORCE:2 Default=YES
PartitionName=patient Nodes=localhost PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=localhost PriorityTier=2
"""


class Cluster:
    """Jobs are submitted to it, and looked at, by Slurm's own commands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.configuration = folder / "slurm.conf"

    def call(self, *command: str) -> str:
        """Run one of Slurm's commands; returns what it prints."""
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, command: str, *options: str) -> str:
        """Submit a shell command as a job; returns the job's id."""
        where = [f"--output={self._folder}/%j.out", "--open-mode=append"]
        return self.call("sbatch", "--parsable", *where, *options, "--wrap", command)

    def field(self, job: str, name: str) -> str:
        """What ``scontrol show job`` shows under this name."""
        pairs = (pair.partition("=") for pair in self.call("scontrol", "show", "job", job).split())
        return next(value for key, _, value in pairs if key == name)

    def until(self, job: str, condition: Callable[[], bool]) -> None:
        """Wait for what the job brings about, unless it fails."""

        def holds() -> bool:
            state = self.field(job, "JobState")
            assert state not in ("FAILED", "TIMEOUT", "NODE_FAIL"), f"job {job}: {state}\n{self.output_of(job)}"
            return condition()

        until(holds, f"job {job}")

    def until_completed(self, job: str) -> None:
        self.until(job, lambda: self.field(job, "JobState") == "COMPLETED")

    def output_of(self, job: str) -> str:
        """What the job has printed, in all its lives."""
        path = self._folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    @property
    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("slurm*.log")))

    @property
    def _environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.configuration)}

    @contextmanager
    def started(self) -> Iterator[None]:
        ports = dict(zip(("controller_port", "node_port"), free_ports(2), strict=True))
        settings = {"folder": self._folder, "user": getpass.getuser(), **ports}
        self.configuration.write_text(CONFIGURATION.format(**settings))
        for name in ("state", "spool"):
            (self._folder / name).mkdir()
        with ExitStack() as programs:
            for name, *options in (("slurmctld", "-D"), ("slurmd", "-D", "-N", "localhost")):
                programs.enter_context(running([name, *options], self._environment))
            until(lambda: self._node_is("idle"), f"a node that is ready:\n{self.logs}")
            try:
                yield
            finally:
                self.call("scancel", "--user", getpass.getuser())
                until(lambda: not self.call("squeue", "--noheader"), "the end of all jobs")

    def _node_is(self, state: str) -> bool:
        command = ["sinfo", "--noheader", "--format=%T", "--partition=plain"]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        return done.stdout.strip() == state


@contextmanager
def private_cluster() -> Iterator[Cluster]:
    """A running cluster; at the end nothing is left of it. Its folder's name is short, as those of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = Cluster(Path(folder))
        with cluster.started():
            yield cluster


@contextmanager
def running(command: list[str], environment: dict[str, str]) -> Iterator[None]:
    """A program in the background that ends with this one, however that ends."""
    program = shutil.which(command[0], path=environment["PATH"] + ":/usr/sbin:/sbin")
    assert program is not None
    process = subprocess.Popen(
        [program, *command[1:]],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
