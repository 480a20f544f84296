"""A function applied to each of several logs; a log that fails does not stop the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

from dalsegno.cli import FAILED
from dalsegno.errors import DalsegnoError

if TYPE_CHECKING:
    from dalsegno.analysis import TrainingLog

T = TypeVar("T")


class PerRunResults(Generic[T]):
    def __init__(self, logs: Iterable[TrainingLog], compute: Callable[[TrainingLog], T]) -> None:
        self.found: list[tuple[TrainingLog, T]] = []
        self.failed: list[tuple[TrainingLog, str]] = []
        """With the error message."""
        for log in logs:
            try:
                self.found.append((log, compute(log)))
            except (DalsegnoError, OSError) as error:
                self.failed.append((log, str(error)))

    def status(self) -> int:
        """The exit status. Prints the failures on stderr."""
        for log, error in self.failed:
            print(f"dalsegno: {log.name}: {error}", file=sys.stderr)
        return FAILED if self.failed else 0
