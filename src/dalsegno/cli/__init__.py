"""The command line: ``dalsegno COMMAND``.

A module has one :class:`~dalsegno.cli.command.Command` of its own name, or ``COMMANDS``, a group of them. Only the
command or group that is called is imported, or those that a help lists. What takes long to import, and is not handed
out lazily by its package, is imported inside functions: torch takes over a second, for which ``dalsegno --help`` must
not wait. No other package imports inside functions for this reason.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import select
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dalsegno.cli.command import FAILED, Command, parse, place
from dalsegno.cli.console import complain
from dalsegno.errors import DalsegnoError, UnknownName, expect_known
from dalsegno.system.exit_status import ExitStatus, exit_status_of
from dalsegno.system.imports import how_to_install, require_extra

COMMANDS = {
    "demo": None,
    "train": None,
    "launch": None,
    "diloco": "Train one model on machines that communicate rarely: a server for the global parameters, and its "
    "workers.",
    "jobs": "List running jobs, ask them for their status, and send them commands.",
    "callbacks": "List the available callbacks and show their arguments.",
    "check-resume": None,
    "logs": "Read, plot, compare and export training logs.",
    "checkpoints": "List, verify, inspect, compare, prune, clean, import and export checkpoints.",
}
"""In the order of the help. For a group the first line of its help, so that ``dalsegno --help`` imports no group."""

RUN_USER_CODE = ("demo", "train", "launch", "check-resume")
"""Commands whose OSErrors keep their traceback, because user code may raise them; elsewhere the message suffices."""
NOT_EVERYWHERE = ("torch", "torchdata", "safetensors", "tensorboard", "numpy")
"""What commands that train or open checkpoints need, and others do not."""
SHELLS = ("bash", "zsh", "tcsh")
TRAINING = ("train", "launch")
"""Commands that end with an :class:`~dalsegno.system.exit_status.ExitStatus`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a progress bar of question marks, not an error, without UTF-8
    try:
        try:
            arguments = parse(_parser(words), words)
            status: int = arguments.run(arguments)
            return status
        finally:
            sys.stdout.flush()  # at exit, Python would only ignore that the disk is full, or the reader gone
    except DalsegnoError as error:
        complain(error)
        return exit_status_of(error) if words[0] in TRAINING else FAILED
    except OSError as error:  # a file cannot be read or written
        if _has_lost_reader():
            return ExitStatus.BROKEN_PIPE
        if words[0] in RUN_USER_CODE:
            raise
        complain(error)
        return FAILED
    except ModuleNotFoundError as error:  # logs are read, and jobs are asked, on machines without torch
        lacking = (error.name or "").partition(".")[0]
        if lacking not in NOT_EVERYWHERE:
            raise
        complain(f"{words[0]} needs {lacking}, which is not installed; {how_to_install()}")
        return FAILED
    except KeyboardInterrupt:
        print("\ndalsegno: interrupted", file=sys.stderr)
        return ExitStatus.INTERRUPTED


def _has_lost_reader() -> bool:
    """Whether nobody reads the output any more. It then leads nowhere, because Python flushes it at exit."""
    if sys.platform == "win32":
        return False
    streams = select.poll()
    for number in (1, 2):
        streams.register(number, 0)
    lost = [number for number, event in streams.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for number in lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return bool(lost)


def _parser(words: Sequence[str] | None) -> argparse.ArgumentParser:
    """The parser of a command line, or, without one, of all commands."""
    parser = argparse.ArgumentParser(
        prog="dalsegno",
        description="Train PyTorch models that resume bit by bit after a kill, and analyze their logs and checkpoints.",
        epilog="Run 'dalsegno COMMAND --help' for a command's options. Exit status: 0 success, 1 negative result (say, "
        "the runs differ), 2 error, 141 nobody reads the output any more; each command's --help lists its own.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parser.add_argument(
        "--print-completion",
        action=_Completion,
        metavar="SHELL",
        help='print a script for bash, zsh or tcsh that completes commands: eval "$(dalsegno --print-completion bash)"',
    )
    parser.set_defaults(parser=parser, run=None, suggest=None)
    places = parser.add_subparsers(metavar="COMMAND")
    for name in _called(COMMANDS, words):
        if COMMANDS[name] and words is not None and name not in words:
            places.add_parser(name, help=COMMANDS[name])
            continue
        stem = name.replace("-", "_")
        module = importlib.import_module(f"{__name__}.{stem}")
        if not hasattr(module, "COMMANDS"):
            _add_command(places, name, getattr(module, stem))
            continue
        group = _add_parser(places, name, module.__doc__ or "")
        group.epilog = f"'dalsegno {name} COMMAND --help' has a command's options and exit statuses."
        group.set_defaults(parser=group)
        inside = group.add_subparsers(metavar="COMMAND")
        rest = None if words is None else words[words.index(name) + 1 :]
        for each in _called(module.COMMANDS, rest, f"{name} "):
            _add_command(inside, each, module.COMMANDS[each])
    return parser


def _called(names: Iterable[str], words: Sequence[str] | None, called: str = "") -> Sequence[str]:
    """The command that ``words`` start with; all ``names`` if they start with an option, or are None."""
    names = tuple(names)
    if not words or words[0].startswith("-"):
        return names
    if words[0] not in names:
        raise UnknownName(f"{called}command", words[0], names)  # argparse would list all, not the nearest
    return words[:1]


def _add_command(places: Any, name: str, command: Command) -> None:
    command.describe(_add_parser(places, name, command.help))


def _add_parser(places: Any, name: str, text: str) -> argparse.ArgumentParser:
    first = text.partition("\n")[0]
    return places.add_parser(  # type: ignore[no-any-return]
        name, help=first, description=text, formatter_class=_Help, allow_abbrev=False
    )


class _Help(argparse.HelpFormatter):
    """Wraps paragraphs to the width of the terminal and keeps indented lines, such as examples, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(each if each.startswith(" ") else fill(each, width, indent) for each in paragraphs)


class _Version(argparse.Action):
    """Looks up the version only on demand: importlib.metadata is slow to import."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from importlib.metadata import version

        print(f"dalsegno {version('dalsegno')}")
        parser.exit()


class _Completion(argparse.Action):
    """Prints a script that completes commands, options and file names: shtab writes it from the parser of all commands,
    so that completing a word starts no Python."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: Any, __: str | None = None) -> None:
        expect_known("shell", [shell], SHELLS)
        require_extra("completion", "shtab", "completion")
        import shtab

        everything = _parser(None)
        for action in _actions(everything):
            if action.type in (Path, place):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(everything, shell))
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
