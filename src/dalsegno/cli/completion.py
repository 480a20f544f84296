"""``dalsegno --print-completion SHELL``: a script that completes commands, options and file names in a shell.

    eval "$(dalsegno --print-completion bash)"      # in ~/.bashrc; zsh: in ~/.zshrc

shtab writes the script from the parser of all commands, so that completing a word starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from dalsegno.cli.command import place
from dalsegno.system.extras import require_extra

SHELLS = ("bash", "zsh", "tcsh")


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script. ``parser``: with all commands."""
    require_extra("completion", "shtab", "completion")
    import shtab

    for action in _actions(parser):
        if action.type in (Path, place):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    script: str = shtab.complete(parser, shell)
    return script


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
