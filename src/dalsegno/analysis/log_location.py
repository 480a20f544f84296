"""LogLocation: the current file of a run's log, which may change while the log is open."""

from __future__ import annotations

from pathlib import Path

from .formats.find import source_of_run
from .formats.source import Source


class LogLocation:
    """A run directory, or one file. A log whose file could not be resumed continues in ``train-2.jsonl``; Hugging Face
    rewrites its log in each checkpoint and deletes older checkpoints."""

    def __init__(self, path: Path, source: Source) -> None:
        """``source``: the log found at ``path``."""
        self._path = path
        self._source = source
        self._names: frozenset[Path] = frozenset()

    def source(self) -> Source:
        """The current log; searches again if files were added or removed."""
        names = self._named()
        if names != self._names:
            found = source_of_run(self._path, self._source.step_key)
            if found is not None and (type(found), found.path) != (type(self._source), self._source.path):
                self._source = found
            self._names = names
        return self._source

    def _named(self) -> frozenset[Path]:
        """The files of the directory; empty if the path is a file."""
        patterns = ("*", "logs/*", "checkpoint-*/trainer_state.json")
        return frozenset(path for pattern in patterns for path in self._path.glob(pattern))
