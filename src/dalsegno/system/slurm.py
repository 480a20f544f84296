"""SlurmJob: the Slurm job that this process is part of. Reads its status, and puts it back into the queue.

Uses ``scontrol``, which every Slurm has; its ``show job`` prints ``Name=value`` pairs.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

_TIMEOUT = 60.0  # seconds; scontrol itself repeats its request while the controller is busy


class SlurmError(Exception):
    """``scontrol`` is missing, does not answer or refuses; the message contains its own."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What Slurm knows about a job."""

    state: str
    """``RUNNING``, say; ``COMPLETING`` once Slurm ends it, for whatever reason."""
    end: float | None
    """Time in Unix seconds at which Slurm ends the job; None if it has no time limit."""
    is_batch: bool
    """Whether ``sbatch`` submitted the job: Slurm cannot requeue those of ``salloc`` and ``srun``."""
    allows_requeue: bool
    """False for ``sbatch --no-requeue``, or where the cluster's default is that."""

    @property
    def is_running(self) -> bool:
        """Whether Slurm lets the job run: it was neither cancelled, nor preempted at once, nor requeued."""
        return self.state in ("RUNNING", "SIGNALING", "RESIZING")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job by its id, as ``scontrol`` takes it: ``15``, or ``15_3`` for a task of a job array.

    Every method raises SlurmError if ``scontrol`` fails.
    """

    id: str

    @classmethod
    def current(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """The job that the environment variables describe, if any."""
        array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
        if array and task:  # the SLURM_JOB_ID of an array's last task is the id of the whole array
            return cls(f"{array}_{task}")
        number = environment.get("SLURM_JOB_ID")
        return cls(number) if number else None

    def status(self) -> JobStatus:
        """Ask Slurm."""
        lines = self._scontrol("show", "job").splitlines()
        fields: dict[str, str] = {}
        for pair in " ".join(lines[1:]).split():  # the first line contains the job's name, which may be any text
            name, _, value = pair.partition("=")
            fields.setdefault(name, value)
        if "JobState" not in fields:
            raise SlurmError(f"scontrol show job {self.id} shows no JobState")
        end = fields.get("EndTime", "")
        return JobStatus(
            state=fields["JobState"],
            end=float(end) if end.isdecimal() else None,
            is_batch=fields.get("BatchFlag") != "0",
            allows_requeue=fields.get("Requeue") != "0",
        )

    def requeue(self) -> None:
        """Put the job back into the queue. Slurm then ends all its processes, by SIGTERM first."""
        self._scontrol("requeue")

    def _scontrol(self, *request: str) -> str:
        command = ["scontrol", *request, self.id]
        try:
            done = subprocess.run(
                command,
                env=os.environ | {"SLURM_TIME_FORMAT": "%s"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT,
                check=False,
            )
        except OSError as error:
            raise SlurmError(f"{' '.join(command)} could not be run: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise SlurmError(f"{' '.join(command)} did not answer within {_TIMEOUT:g} s") from error
        if done.returncode != 0:
            words = done.stderr.strip() or done.stdout.strip() or "no output"
            raise SlurmError(f"{' '.join(command)} failed with status {done.returncode}: {words}")
        return done.stdout
