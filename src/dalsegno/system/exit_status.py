"""ExitStatus: how a training program ended, for shells, schedulers and launchers.

One table for ``dalsegno train``, ``dalsegno launch`` and programs that end with
``sys.exit(trainer.train().exit_status)``.
"""

from __future__ import annotations

from enum import IntEnum

from dalsegno.errors import ConfigurationError, EventNotFired, LeaseLost, Locked, NotFound, StateMismatch


class ExitStatus(IntEnum):
    """Exit status of a training program."""

    DONE = 0
    """Trained to the end, or stopped early by a callback, the program or a user."""
    ERROR = 1
    """An exception."""
    WRONG_USE = 2
    """An argument or a configuration that cannot work: the same command fails again."""
    DIVERGED = 3
    """A callback judged that training has diverged; the run stays ended."""
    TAKEN_OVER = 4
    """Another process has taken the run over and continues it."""
    IN_USE = 5
    """Another process uses the ``output_dir``: the same command works once that has ended."""
    RUN_AGAIN = 75
    """Stopped in time, by a signal or a time limit, with a checkpoint: the same command continues the run. It is
    ``EX_TEMPFAIL`` of ``sysexits.h``."""
    INTERRUPTED = 130
    """A second Ctrl-C ended training at once: 128 + SIGINT, as in shells."""
    BROKEN_PIPE = 141
    """Whoever read the output of a command has gone: 128 + SIGPIPE, as in shells."""


def exit_status_of(error: BaseException) -> ExitStatus:
    """Exit status of a program that ``error`` ended."""
    if isinstance(error, KeyboardInterrupt):
        return ExitStatus.INTERRUPTED
    if isinstance(error, (ConfigurationError, EventNotFired, NotFound, StateMismatch)):
        return ExitStatus.WRONG_USE
    if isinstance(error, LeaseLost):
        return ExitStatus.TAKEN_OVER
    return ExitStatus.IN_USE if isinstance(error, Locked) else ExitStatus.ERROR
