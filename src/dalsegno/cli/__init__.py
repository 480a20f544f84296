"""The command line: ``dalsegno COMMAND``.

Each command is a module with ``describe(parser)`` and ``run(arguments) -> exit status``. Only here are imports allowed
inside of functions: torch takes more than a second to import, and ``dalsegno --help`` shall not wait for it. What a
command needs it imports when it runs.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from dalsegno.errors import DalsegnoError, UnknownName

from . import callbacks, check_resume, demo, train

COMMANDS = {"demo": demo, "train": train, "callbacks": callbacks, "check-resume": check_resume}

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
        if words and not words[0].startswith("-") and words[0] not in COMMANDS:
            raise UnknownName("command", words[0], COMMANDS)
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
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.describe(command)
        command.set_defaults(run=module.run)
    return parser


class _Version(argparse.Action):
    """Looks the version up only if it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from importlib.metadata import version

        print(f"dalsegno {version('dalsegno')}")
        parser.exit()
