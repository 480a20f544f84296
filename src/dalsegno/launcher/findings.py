"""Findings: why the ranks of a leg ended, in words, and whether restarting them leads anywhere."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from dalsegno.system.machine import control_groups

MOST_LOSSES = 3
"""Number of legs in a row, lost at the same step or an earlier one, after which there are no more restarts."""

MISTAKES = (NameError, AttributeError, TypeError, ImportError, SyntaxError)
"""Exceptions that a program raises again where it has raised them once."""


class Finding(NamedTuple):
    """Why a leg ended."""

    cause: str
    is_certain: bool
    """False for an exception: it may only be the loss of another rank."""
    time: float
    """UTC seconds."""


def first_cause(findings: list[Finding]) -> Finding | None:
    """The finding that explains the others: a kill or a hang rather than an exception, then the earliest."""
    return min(findings, key=lambda each: (not each.is_certain, each.time), default=None)


_KEY = "dalsegno/finding"  # of the first cause, in the store of the leg's hosts


def publish(store: Any, finding: Finding) -> None:
    """Offer the other hosts a finding about this leg: the store keeps that of the first cause."""
    there = ""
    while not there or first_cause([Finding(*json.loads(there)), finding]) is finding:
        there = store.compare_set(_KEY, there, json.dumps(finding)).decode()


def published(store: Any) -> Finding | None:
    """The first cause of what the hosts have found out about this leg so far."""
    return Finding(*json.loads(store.get(_KEY))) if store.check([_KEY]) else None


class RankError(NamedTuple):
    """The exception that ended a rank, as the rank wrote it to a file."""

    text: str
    time: float
    is_mistake: bool = False
    """Whether the program is wrong: an unknown name, a wrong type, a missing module."""

    @classmethod
    def path(cls, folder: Path, local_rank: int) -> Path:
        return folder / f"error-{local_rank}.json"

    @classmethod
    def write(cls, folder: Path, local_rank: int, error: BaseException) -> None:
        first_line = str(error).partition("\n")[0]
        found = cls(f"{type(error).__name__}: {first_line}", time.time(), isinstance(error, MISTAKES))
        cls.path(folder, local_rank).write_text(json.dumps(found))

    @classmethod
    def read(cls, folder: Path, local_rank: int) -> Self | None:
        """None if the rank raised nothing."""
        try:
            return cls(*json.loads(cls.path(folder, local_rank).read_text()))
        except (FileNotFoundError, ValueError):
            return None


def judge(exits: Mapping[int, int], errors: Mapping[int, RankError], *, out_of_memory: bool) -> Finding | None:
    """Find the first cause among the ranks that failed by themselves.

    Args:
        exits: exit status of each such rank, or minus the number of the signal that killed it.
        errors: what each raised.
        out_of_memory: whether the kernel has killed a process for lack of memory.
    """
    found = []
    for rank, status in exits.items():
        error = errors.get(rank)
        if status < 0:
            name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
            why = "was killed for lack of memory (SIGKILL)" if out_of_memory and name == "SIGKILL" else None
            found.append(Finding(f"rank {rank} {why or f'was killed by {name}'}", True, time.time()))
        elif error is not None:
            found.append(Finding(f"rank {rank} raised {error.text}", False, error.time))
        else:
            found.append(Finding(f"rank {rank} ended with exit status {status}", False, time.time()))
    return first_cause(found)


class OutOfMemoryKills:
    """Counts the kernel's out-of-memory kills: of this process's cgroup, else of the host."""

    def __init__(self, files: list[Path] | None = None) -> None:
        groups = (each / "memory.events" for each in control_groups())
        self._files = files or [*groups, Path("/proc/vmstat")]  # with a line ``oom_kill N``, the most specific first
        self._before = self._count()

    def happened(self) -> bool:
        """Whether there was one since the last call, or since the start."""
        before, self._before = self._before, self._count()
        return self._before > before

    def _count(self) -> int:
        for file in self._files:
            try:
                lines = file.read_text().splitlines()
            except OSError:
                continue
            counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
            if counts:
                return counts[0]
        return 0


class RestartProgress:
    """Whether restarts lead anywhere: each leg should get further than all before."""

    def __init__(self) -> None:
        self._furthest = -1
        self._losses = 0  # legs that ended at the furthest step or before, since it was first reached

    def note(self, reached: int) -> bool:
        """Note the step at which a leg was lost. False if the same step was reached and lost three times.

        A leg without steps (-1) is not counted: it may run a loop of another kind.
        """
        if reached < 0:
            return True
        if reached > self._furthest:
            self._furthest, self._losses = reached, 0
        self._losses += 1
        return self._losses < MOST_LOSSES

    def __str__(self) -> str:
        return f"{self._losses} legs in a row got no further than step {self._furthest}"
