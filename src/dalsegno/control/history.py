"""RunHistory: legs and commands of a run, from the files in its directory. The live page marks them on the curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dalsegno.errors import StateMismatch
from dalsegno.logs import RunFile

from .journal import Journal, JournalEntry

MOST_COMMANDS = 1000
"""The newest are returned."""

_LEG = ("leg", "started", "ended", "from_checkpoint", "first_step", "last_step", "reason", "by", "why")
_COMMAND = ("id", "time", "by", "command", "data", "step", "error")


class RunHistory:
    """The history of the run in ``output_dir``. Usable from any thread."""

    def __init__(self, output_dir: Path) -> None:
        self._run = RunFile(output_dir)
        self._journal = Journal(output_dir)
        self._read: tuple[int, list[JournalEntry]] = 0, []  # the journal's size, and its commands

    def __call__(self) -> dict[str, Any]:
        """Legs and commands, oldest first; empty where a file is missing or damaged."""
        try:
            run = self._run.load()
        except StateMismatch:  # the next leg replaces it or refuses it
            run = None
        commands = sorted(self._commands(), key=lambda entry: entry.time)[-MOST_COMMANDS:]
        return {
            "legs": [{name: getattr(leg, name) for name in _LEG} for leg in run.legs] if run else [],
            "commands": [{name: getattr(entry, name) for name in _COMMAND} for entry in commands],
        }

    def _commands(self) -> list[JournalEntry]:
        """Read the journal only when it has grown: it warns of each damaged line whenever it is read."""
        try:
            size = self._journal.path.stat().st_size
        except FileNotFoundError:
            return []
        if size != self._read[0]:
            self._read = size, self._journal.read()
        return self._read[1]
