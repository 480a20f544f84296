"""Place: where a run's log lies, which may become another file while the log is open."""

from __future__ import annotations

from pathlib import Path

from .formats.find import source_of_run
from .formats.source import Source


class LogLocation:
    """A run's folder, or one file. A log that had to move goes on in ``train-2.jsonl``; Hugging Face's is written anew
    into each checkpoint, and the older ones are deleted."""

    def __init__(self, path: Path, source: Source) -> None:
        """``source``: what was found there."""
        self._path = path
        self._source = source
        self._names: frozenset[Path] = frozenset()

    def source(self) -> Source:
        """What is there now. Looks for another one if files have come or gone."""
        names = self._named()
        if names != self._names:
            found = source_of_run(self._path, self._source.step_key)
            if found is not None and (type(found), found.path) != (type(self._source), self._source.path):
                self._source = found
            self._names = names
        return self._source

    def _named(self) -> frozenset[Path]:
        """None for a file, which stays what it is."""
        patterns = ("*", "logs/*", "checkpoint-*/trainer_state.json")
        return frozenset(path for pattern in patterns for path in self._path.glob(pattern))
