"""What a full disk does to a run, and any other error of the file system.

==========================  ============================================================================================
a checkpoint                its files are removed, and training continues: :class:`FailedSaves` counts
the record of a log         is lost, and training continues: ``callbacks/loggers/json_logger.py``
``run.json``, commands,     the leg ends with SaveFailed: :func:`expect_room`. It has recorded nothing that the run does
rollbacks                   not do, so the next leg resumes from the newest checkpoint
==========================  ============================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dalsegno.distributed import collectives
from dalsegno.errors import SaveFailed

logger = logging.getLogger("dalsegno")


@contextmanager
def expect_room(path: Path, consequence: str) -> Iterator[None]:
    """Around writes of a file without which the leg cannot continue: an OSError becomes SaveFailed."""
    try:
        yield
    except OSError as error:
        raise SaveFailed(f"{path} could not be written: {error}; {consequence}; make room first") from error


class FailedSaves:
    """Counts the consecutive saves of a leg that have failed, of which ``most`` end it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._failures: list[SaveFailed] = []
        self.must_succeed = True
        """False: all ranks have agreed to end the leg without a checkpoint."""

    def note_success(self) -> None:
        self._failures.clear()

    def note(self, failure: SaveFailed) -> None:
        """Raises ``failure`` if it is one too many; else logs it."""
        self._failures.append(failure)
        if len(self._failures) >= self._most:
            failure.add_note(f"max_failed_saves={self._most} in a row")
            raise failure
        if collectives.rank() == 0:
            logger.error("%s; training continues, and the next save is tried as usual", failure)

    def expect_last(self) -> None:
        """Raises SaveFailed if the leg's last save has failed, and must not."""
        if self._failures and self.must_succeed:
            raise self._failures[-1]
