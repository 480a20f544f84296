"""The command line: ``dalsegno COMMAND``.

Each command is a module with ``describe(parser)`` and ``run(arguments) -> exit status``, or a group of commands: a
package with ``COMMANDS`` of its own. Only here are imports allowed inside of functions: torch takes more than a second
to import, and ``dalsegno --help`` shall not wait for it. What a command needs it imports when it runs.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from dalsegno.errors import DalsegnoError, UnknownName

from . import callbacks, check_resume, checkpoints, demo, logs, train

COMMANDS: dict[str, ModuleType] = {
    "demo": demo,
    "train": train,
    "callbacks": callbacks,
    "check-resume": check_resume,
    "logs": logs,
    "checkpoints": checkpoints,
}

FAILED = 2
"""Exit status: what was asked for could not be done. 1 is a command's own "no"."""
INTERRUPTED = 130
"""Exit status: Ctrl-C, as shells have it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a bar of question marks is better than none
    try:
        _check_names(words, COMMANDS)
        arguments = _parser().parse_args(words)
        status: int = arguments.run(arguments)
        return status
    except DalsegnoError as error:
        print(f"dalsegno: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # nobody reads any more; nor shall Python's last flush fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        print("\ndalsegno: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dalsegno",
        description="Training runs that survive being killed.",
        epilog="'dalsegno COMMAND --help' tells more. Exit status 1: something differs; 2: it could not be done.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    _add_commands(parser, COMMANDS)
    return parser


def _add_commands(parser: argparse.ArgumentParser, commands: Mapping[str, ModuleType]) -> None:
    places = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module in commands.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        command = places.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if inner := _commands_of(module):
            _add_commands(command, inner)
        else:
            module.describe(command)
            command.set_defaults(run=module.run)


def _check_names(words: Sequence[str], commands: Mapping[str, ModuleType], group: str = "") -> None:
    """argparse would list all commands there are, and name none that may have been meant."""
    if not words or words[0].startswith("-"):
        return
    if words[0] not in commands:
        raise UnknownName(f"{group}command", words[0], commands)
    if inner := _commands_of(commands[words[0]]):
        _check_names(words[1:], inner, f"{group}{words[0]} ")


def _commands_of(module: ModuleType) -> Mapping[str, ModuleType]:
    """The commands of a group; none where the module is a command itself."""
    inner: Mapping[str, ModuleType] = getattr(module, "COMMANDS", {})
    return inner


class _Version(argparse.Action):
    """Looks the version up only if it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from importlib.metadata import version

        print(f"dalsegno {version('dalsegno')}")
        parser.exit()
