"""The command line: ``dalsegno COMMAND``.

Each command is a module with ``describe(parser)`` and ``run(arguments) -> exit status``, and perhaps
``suggest(unknown arguments) -> what was meant``; or a group of commands: a
package with ``COMMANDS`` of its own. Only here are imports allowed inside of functions: torch takes more than a second
to import, and ``dalsegno --help`` shall not wait for it. What a command needs it imports when it runs, and of the
commands only the one that is called is imported at all.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from dalsegno.errors import DalsegnoError, UnknownName

COMMANDS = ("demo", "train", "callbacks", "check-resume", "logs", "checkpoints")
"""In the order of their help."""

FAILED = 2
"""Exit status: what was asked for could not be done. 1 is a command's own "no"."""
RUN_OTHERS_CODE = ("demo", "train", "check-resume")
"""What these raise may come from code of the user's, and shows where; the others' errors are a line each."""
INTERRUPTED = 130
"""Exit status: Ctrl-C, as shells have it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a bar of question marks is better than none
    try:
        parser = _parser(words)
        arguments, unknown = parser.parse_known_args(words)
        if unknown:
            suggest: Callable[[Sequence[str]], str] = getattr(arguments, "suggest", lambda _: "")
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{suggest(unknown)}")
        status: int = arguments.run(arguments)
        return status
    except DalsegnoError as error:
        print(f"dalsegno: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # nobody reads any more; nor shall Python's last flush fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:  # a disk that cannot be read or written
        if words[0] in RUN_OTHERS_CODE:
            raise
        print(f"dalsegno: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\ndalsegno: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dalsegno",
        description="Training runs that survive being killed.",
        epilog="'dalsegno COMMAND --help' tells more. Exit status 1: something differs; 2: it could not be done.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    _add_commands(parser, sys.modules[__name__], words)
    return parser


def _add_commands(parser: argparse.ArgumentParser, group: ModuleType, words: Sequence[str], called: str = "") -> None:
    """The one command of the group that ``words`` begin with; all of them where they begin with an option.

    Raises:
        UnknownName: if they begin with something else. (argparse would list all that there are, and name none.)
    """
    names: Sequence[str] = group.COMMANDS
    if words and not words[0].startswith("-"):
        if words[0] not in names:
            raise UnknownName(f"{called}command", words[0], names)
        names = words[:1]
    places = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in names:
        module = importlib.import_module(f"{group.__name__}.{name.replace('-', '_')}")
        command = places.add_parser(
            name,
            help=(module.__doc__ or "").partition("\n")[0],
            description=module.__doc__,
            formatter_class=_Help,
            allow_abbrev=False,
        )
        if hasattr(module, "COMMANDS"):
            _add_commands(command, module, words[1:], f"{called}{name} ")
        else:
            module.describe(command)
            command.set_defaults(run=module.run)
            if hasattr(module, "suggest"):
                command.set_defaults(suggest=module.suggest)


class _Help(argparse.HelpFormatter):
    """Paragraphs are as wide as the terminal; lines that are indented, as examples are, stay what they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(each if each.startswith(" ") else fill(each, width, indent) for each in paragraphs)


class _Version(argparse.Action):
    """Looks the version up only if it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from importlib.metadata import version

        print(f"dalsegno {version('dalsegno')}")
        parser.exit()
