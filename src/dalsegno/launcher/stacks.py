"""Stacks of a hung rank's threads: the rank writes them to a file of its own and ends, the launcher prints them."""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

DUMP = signal.SIGUSR2
"""Signal at which a rank writes its stacks and ends."""


def write_stacks_at_signal(folder: Path, local_rank: int) -> None:
    """Make this process write the stacks of its threads to a file in ``folder`` at ``DUMP``, and end.

    A file for each rank: hung ranks write at the same moment, and their lines would mix in one standard error.
    """
    path = _path(folder, local_rank)
    path.touch(mode=0o600)
    file = path.open("wb")
    # The default action of the signal follows the dump, so the process ends only after the dump is complete.
    faulthandler.register(DUMP, file=file, chain=True)


def print_stacks(folder: Path, ranks: Mapping[int, int]) -> None:
    """Print what the ranks wrote to standard error, each line with its rank.

    Args:
        ranks: global rank of each local rank.
    """
    for local_rank, rank in ranks.items():
        path = _path(folder, local_rank)
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)


def _path(folder: Path, local_rank: int) -> Path:
    return folder / f"stacks-{local_rank}.txt"
