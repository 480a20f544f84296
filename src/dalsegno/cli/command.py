"""Command: one command of ``dalsegno``, with its parser, its exit statuses, and arguments that many commands share."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dalsegno.errors import ConfigurationError, nearest
from dalsegno.system.exit_status import ExitStatus

T = TypeVar("T")

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


Arguments = Callable[[Any], None]
"""Adds arguments to a parser, or to a group within one."""


def argument(*names: str, **options: Any) -> Arguments:
    """Any argument; ``options`` are those of argparse's ``add_argument``."""
    words = {int: "an integer", float: "a number"}
    if (kind := options.get("type")) in words:
        options["type"] = converter(kind, words[kind])
    return lambda parser: parser.add_argument(*names, **options)


def converter(kind: Callable[[str], T], needs: str) -> Callable[[str], T]:
    """``kind`` as a ``type`` of argparse, whose error says what is needed; argparse would name the function."""

    def convert(text: str) -> T:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: needs {needs}") from None

    return convert


def flag(*names: str, help: str, dest: str | None = None) -> Arguments:
    """An option without a value; False by default."""
    return argument(*names, action="store_true", dest=dest, help=help)


def option(
    *names: str, metavar: str, help: str, default: Any = None, type: Callable[[str], Any] | None = None
) -> Arguments:
    """An option with a value. A default gives the type, and is added to the help unless the help mentions it."""
    if default not in (None, "") and "default" not in help:
        help += f"; default: %(default){'g' if isinstance(default, float) else 's'}"
    if type is None:
        kinds = (Path, int, float)
        type = next((kind for kind in kinds if isinstance(default, kind)), str)
    return argument(*names, metavar=metavar, type=type, default=default, help=help)


def several(*arguments: Arguments) -> Arguments:
    """Several arguments."""

    def add(parser: Any) -> None:
        for one in arguments:
            one(parser)

    return add


def one_of(*arguments: Arguments, required: bool = False) -> Arguments:
    """Options that exclude each other."""
    return lambda parser: several(*arguments)(parser.add_mutually_exclusive_group(required=required))


JSON = flag("--json", help="print JSON")
METRIC, METRICS = ("--metric", "--metrics"), ("--metrics", "--metric")
"""Names of the option for one metric, and for several: either word is right everywhere."""


class Command:
    """A command. A module whose ``COMMANDS`` maps names to these is a group of commands.

    Args:
        run: carries the command out; returns the exit status.
        describe: the command's arguments.
        exit_statuses: meanings of exit statuses that are the command's own.
        help: its first line is shown in the list of commands.
        suggest: returns a hint for unrecognized arguments.
    """

    def __init__(
        self,
        run: Callable[[argparse.Namespace], int],
        describe: Arguments,
        exit_statuses: Mapping[int, str],
        help: str | None,
        suggest: Callable[[Sequence[str]], str] | None = None,
    ) -> None:
        self.run = run
        self.describe = describe
        self.suggest = suggest
        first, _, rest = (help or "").partition("\n")
        self.help = f"{first}\n{textwrap.dedent(rest)}".rstrip()
        meanings = {0: "success", FAILED: "error", **exit_statuses, ExitStatus.INTERRUPTED: "interrupted by Ctrl-C"}
        self.epilog = f"Exit status: {'; '.join(f'{status:d} {meanings[status]}' for status in sorted(meanings))}."


def command(
    *arguments: Arguments, statuses: Mapping[int, str] | None = None, help: str | None = None
) -> Callable[[Callable[[argparse.Namespace], int]], Command]:
    """Make a command of a function, whose docstring is the help. ``statuses``: exit statuses that are its own."""
    return lambda run: Command(run, several(*arguments), statuses or {}, help or run.__doc__)


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """As ``parse_args``, but with the usage of the command itself in an error, and the nearest option.

    A group without a command prints its help. The parser's default ``parser`` is the command's parser or the group's,
    ``run`` is None for a group, ``suggest`` as for :class:`Command`.
    """
    arguments, unknown = parser.parse_known_args(words)
    own: argparse.ArgumentParser = arguments.parser
    if unknown:
        options = [name for action in own._actions for name in action.option_strings]
        wrong = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
        if meant := nearest(wrong, options) if wrong else None:
            hint = f"; did you mean {meant!r}?"
        else:
            hint = arguments.suggest(unknown) if arguments.suggest else ""
        own.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if arguments.run is None:
        own.exit(FAILED, own.format_help())
    return arguments


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


DIR = argument(
    "place",
    metavar="DIR",
    nargs="?",
    type=place,
    default=Path(),
    help="run directory or checkpoint; default: the current directory",
)
"""``DIR`` of the commands on checkpoints, as ``arguments.place``."""


def expect_directory_of(path: Path) -> None:
    """Raises ConfigurationError if the directory in which ``-o`` names a file does not exist."""
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"-o {path}: there is no directory {path.parent}")
