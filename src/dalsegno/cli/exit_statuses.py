"""Exit statuses of the commands: their meanings, as each command's ``--help`` prints them."""

from __future__ import annotations

from collections.abc import Mapping

from dalsegno.system.exit_status import ExitStatus

COMMON: Mapping[int, str] = {0: "success", 2: "error"}
"""Of every command, unless its module's ``EXIT_STATUSES`` adds to them or replaces them."""

OF_TRAINING: Mapping[int, str] = {
    ExitStatus.DONE: "finished, or stopped early by a callback",
    ExitStatus.ERROR: "error",
    ExitStatus.WRONG_USE: "wrong use",
    ExitStatus.DIVERGED: "diverged",
    ExitStatus.TAKEN_OVER: "taken over by another process",
    ExitStatus.RUN_AGAIN: "stopped in time by a signal or a time limit: the same command continues the run",
}


def in_words(own: Mapping[int, str]) -> str:
    """The last paragraph of a command's help. ``own``: the command's ``EXIT_STATUSES``."""
    meanings = {**COMMON, **own, ExitStatus.INTERRUPTED: "interrupted by Ctrl-C"}
    return f"Exit status: {'; '.join(f'{status:d} {meanings[status]}' for status in sorted(meanings))}."
