"""Command: one command of ``dalsegno``, as a group in one file lists it."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Mapping, Sequence


class Command:
    """A command. A module whose ``COMMANDS`` maps names to these is a group of commands.

    Args:
        run: carries the command out; returns the exit status.
        describe: adds the command's arguments to its parser.
        exit_statuses: meanings of exit statuses that are the command's own.
        suggest: returns a hint for unrecognized arguments.
        help: default: the docstring of ``run``.
    """

    def __init__(
        self,
        run: Callable[[argparse.Namespace], int],
        describe: Callable[[argparse.ArgumentParser], None],
        exit_statuses: Mapping[int, str] | None = None,
        suggest: Callable[[Sequence[str]], str] | None = None,
        help: str | None = None,
    ) -> None:
        self.run = run
        self.describe = describe
        self.exit_statuses = exit_statuses or {}
        self.suggest = suggest
        first, _, rest = (run.__doc__ or "" if help is None else help).partition("\n")
        self.help = f"{first}\n{textwrap.dedent(rest)}".rstrip()
