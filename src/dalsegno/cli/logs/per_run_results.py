"""One question to each of several runs. One that cannot answer keeps nobody from the answers of the others."""

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
    def __init__(self, logs: Iterable[TrainingLog], ask: Callable[[TrainingLog], T]) -> None:
        self.given: list[tuple[TrainingLog, T]] = []
        self.missing: list[tuple[TrainingLog, str]] = []
        """With the reason."""
        for log in logs:
            try:
                self.given.append((log, ask(log)))
            except (DalsegnoError, OSError) as error:
                self.missing.append((log, str(error)))

    def status(self) -> int:
        """The exit status. Says on stderr who has not answered, and why."""
        for log, error in self.missing:
            print(f"dalsegno: {log.name}: {error}", file=sys.stderr)
        return FAILED if self.missing else 0
