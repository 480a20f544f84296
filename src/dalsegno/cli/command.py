"""Command: one command of ``dalsegno``, with its parser, its exit statuses, and arguments that many commands share."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dalsegno.errors import ConfigurationError
from dalsegno.system.exit_status import ExitStatus

FAILED = 2
"""Exit status: the command failed. 1 is a command's own negative result."""

OF_TRAINING: Mapping[int, str] = {
    ExitStatus.DONE: "finished, or stopped early by a callback",
    ExitStatus.ERROR: "error",
    ExitStatus.WRONG_USE: "wrong use",
    ExitStatus.DIVERGED: "diverged",
    ExitStatus.TAKEN_OVER: "taken over by another process",
    ExitStatus.RUN_AGAIN: "stopped in time by a signal or a time limit: the same command continues the run",
}
"""Exit statuses of commands that train."""


class Parser(argparse.ArgumentParser):
    """The parser of one command."""

    def flag(self, *names: str, help: str, dest: str | None = None) -> None:
        """An option without a value; False by default."""
        self.add_argument(*names, action="store_true", dest=dest, help=help)

    def option(
        self, *names: str, metavar: str, help: str, default: Any = None, type: Callable[[str], Any] | None = None
    ) -> None:
        """An option with a value. A default gives the type, and is added to the help unless the help mentions it."""
        if default not in (None, "") and "default" not in help:
            help += f"; default: %(default){'g' if isinstance(default, float) else 's'}"
        if type is None:
            kinds = (Path, int, float)
            type = next((kind for kind in kinds if isinstance(default, kind)), str)
        self.add_argument(*names, metavar=metavar, type=type, default=default, help=help)

    def json(self) -> None:
        self.flag("--json", help="print JSON")


class Command:
    """A command. A module whose ``COMMANDS`` maps names to these is a group of commands.

    Args:
        run: carries the command out; returns the exit status. Its docstring is the help.
        describe: adds the command's arguments to its parser.
        exit_statuses: meanings of exit statuses that are the command's own.
        suggest: returns a hint for unrecognized arguments.
        help: replaces the docstring of ``run``.
    """

    def __init__(
        self,
        run: Callable[[argparse.Namespace], int],
        describe: Callable[[Parser], None],
        exit_statuses: Mapping[int, str] | None = None,
        suggest: Callable[[Sequence[str]], str] | None = None,
        help: str | None = None,
    ) -> None:
        self.run = run
        self.describe = describe
        self.suggest = suggest
        first, _, rest = (run.__doc__ or "" if help is None else help).partition("\n")
        self.help = f"{first}\n{textwrap.dedent(rest)}".rstrip()
        meanings = {0: "success", FAILED: "error", **(exit_statuses or {})}
        meanings[ExitStatus.INTERRUPTED] = "interrupted by Ctrl-C"
        self.epilog = f"Exit status: {'; '.join(f'{status:d} {meanings[status]}' for status in sorted(meanings))}."


def place(text: str) -> Path:
    """The path; for a URL, the local directory in which this host writes its run.

    Raises:
        ArgumentTypeError: if it is a URL without such a directory.
    """
    from dalsegno.system.urls import cache_dir, is_url

    if not is_url(text):
        return Path(text)
    folder = cache_dir(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is a URL, and this command reads local directories; the run's directory on this host, {folder}, "
            "does not exist: pass its local_dir, or copy the run to this host"
        )
    return folder


def expect_directory_of(path: Path) -> None:
    """Raises ConfigurationError if the directory in which ``-o`` names a file does not exist."""
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"-o {path}: there is no directory {path.parent}")
