"""Command: one command of ``dalsegno``, with its parser, its exit statuses, and arguments that many commands share."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
    ExitStatus.IN_USE: "another process uses the output_dir",
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


_KINDS = {"N": int, "H": int, "STEPS": int, "SECONDS": float, "SHARE": float, "V": float, "S": float, "EPOCHS": float}
_KINDS |= dict.fromkeys(("FILE", "DIR", "FOLDER", "PATH"), Path)
"""By the name of an option's value, its type; others are texts."""


def option(
    *names: str,
    metavar: str,
    help: str,
    default: Any = None,
    type: Callable[[str], Any] | None = None,
    dest: str | None = None,
) -> Arguments:
    """An option with a value. The default gives the type, or the value's name. It is added to the help unless the help
    mentions it."""
    if default not in (None, "") and "default" not in help:
        help += f"; default: %(default){'g' if isinstance(default, float) else 's'}"
    if type is None and default is None:
        type = _KINDS.get(metavar, str)
    elif type is None:
        type = next((kind for kind in (Path, int, float) if isinstance(default, kind)), str)
    return argument(*names, metavar=metavar, type=type, default=default, help=help, dest=dest)


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


class Command(NamedTuple):
    """A command: what a function does, its arguments, its help."""

    run: Callable[[argparse.Namespace], int]
    """Carries the command out; returns the exit status."""
    arguments: Arguments
    statuses: Mapping[int, str]
    """Meanings of exit statuses that are the command's own."""
    help: str
    """Its first line is shown in the list of commands."""
    suggest: Callable[[Sequence[str]], str] | None
    """Returns a hint for unrecognized arguments."""

    def describe(self, parser: argparse.ArgumentParser) -> None:
        """Make ``parser`` that of this command."""
        meanings = {0: "success", FAILED: "error", **self.statuses, ExitStatus.INTERRUPTED: "interrupted by Ctrl-C"}
        parser.epilog = f"Exit status: {'; '.join(f'{status:d} {meanings[status]}' for status in sorted(meanings))}."
        self.arguments(parser)
        parser.set_defaults(parser=parser, run=self.run, suggest=self.suggest)


def command(
    *arguments: Arguments,
    statuses: Mapping[int, str] | None = None,
    help: str | None = None,
    suggest: Callable[[Sequence[str]], str] | None = None,
) -> Callable[[Callable[[argparse.Namespace], int]], Command]:
    """Make a command of a function, whose docstring is the help unless that is given."""

    def make(run: Callable[[argparse.Namespace], int]) -> Command:
        first, _, rest = (help or run.__doc__ or "").partition("\n")
        return Command(run, several(*arguments), statuses or {}, f"{first}\n{textwrap.dedent(rest)}".rstrip(), suggest)

    return make


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """As ``parse_args``, but with the usage of the command itself in an error, and the nearest option.

    A group without a command prints its help: its ``run`` is None.
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
    """The path; for a URL, the local directory in which this host writes its run."""
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


def settings_of(kind: type[T], arguments: argparse.Namespace) -> T:
    """An instance of a dataclass whose fields are the names of options."""
    from dataclasses import fields

    return kind(**{field.name: getattr(arguments, field.name) for field in fields(kind)})  # type: ignore[arg-type]
