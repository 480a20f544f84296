"""Writes its page from the parsers of the command line: ``python docs/reference/commands.py``. A test compares them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

from dalsegno.cli import _parser

PAGE = Path(__file__).with_suffix(".md")

HEAD = """\
# Commands

<!-- Written by docs/reference/commands.py from the parsers in src/dalsegno/cli. -->

All commands of `dalsegno`. `dalsegno COMMAND --help` prints the same.
`eval "$(dalsegno --print-completion bash)"` completes commands, options and file names; also for `zsh` and `tcsh`.
`NO_COLOR=1` turns colours off. Every command that reads prints JSON with `--json`.

| command | |
|---|---|
"""


def pages() -> dict[Path, str]:
    """Return the whole page."""
    commands = list(_commands(_parser(None)))
    rows = [f"| [`{each.prog}`](#{_anchor(each)}) | {_text(each).splitlines()[0]} |" for each in commands]
    return {PAGE: HEAD + "\n".join(rows) + "\n" + "".join(map(_section, commands))}


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The commands, in the order of the help, without groups of them."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser
    for group in groups:
        for command in group.choices.values():
            yield from _commands(command)


def _section(command: argparse.ArgumentParser) -> str:
    arguments = [
        action for action in command._actions if action.help is not argparse.SUPPRESS and action.dest != "help"
    ]
    rows = [f"| {_invocation(action)} | {_meaning(action, command.prog)} |" for action in arguments]
    table = ["| argument | |", "|---|---|", *rows, ""] if rows else []
    return "\n".join([f"\n## {command.prog}\n", _text(command), "", *table, (command.epilog or "").strip(), ""])


def _anchor(command: argparse.ArgumentParser) -> str:
    return command.prog.replace(" ", "-")


def _text(parser: argparse.ArgumentParser) -> str:
    """The description; what is indented, such as examples, is code."""
    text = (parser.description or "").strip("\n")
    return re.sub(
        r"(?:^ .*\n(?:\n(?= ))?)+", lambda code: f"```\n{dedent(code[0])}```\n", f"{text}\n", flags=re.M
    ).strip()


def _invocation(action: argparse.Action) -> str:
    value = _value(action)
    names = action.option_strings or [""]
    return ", ".join(f"`{f'{name} {value}'.strip()}`" for name in names).replace("|", "\\|")


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    name = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    shown = " ".join(name) if isinstance(name, tuple) else name
    patterns = {"?": f"[{shown}]", "*": f"[{shown} …]", "+": f"{shown} …", argparse.REMAINDER: "…"}
    return patterns.get(str(action.nargs), shown)


def _meaning(action: argparse.Action, prog: str) -> str:
    return (str(action.help or "") % {**vars(action), "prog": prog}).replace("|", "\\|")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
