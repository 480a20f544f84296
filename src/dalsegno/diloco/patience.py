"""Patience: a write that the server cannot do without is tried again until the disk takes it."""

from __future__ import annotations

import errno
import logging
import math
import threading
from collections.abc import Callable
from time import monotonic

from dalsegno.errors import DalsegnoError
from dalsegno.system.durability import NotDurable

logger = logging.getLogger("dalsegno")

_PAUSE = 0.5  # seconds between two attempts
_REPORT_EVERY = 60.0  # seconds

_FINAL = {errno.ENOENT, errno.EROFS}
"""The folder is gone, or the disk is read-only, as Linux makes it after an error: neither passes by itself."""


class Closing(Exception):
    """The server closes while the disk refuses a write."""


class Patience:
    """Waits for a disk that is full, or has another trouble that may pass. Used by one thread, except :meth:`close`."""

    def __init__(self) -> None:
        self.obstacle: str | None = None
        """Why the disk refuses what workers wait for, if it does."""
        self._closing = threading.Event()

    def close(self) -> None:
        """Wait no longer. May be called on any thread."""
        self._closing.set()

    def insist(self, write: Callable[[], object]) -> None:
        """Call ``write`` until it raises no OSError. Why it waits is logged at once, and then every minute.

        Raises:
            Closing: if :meth:`close` is called before.
            DalsegnoError, NotDurable: of ``write``: trying again would not help.
            OSError: of ``write``, if the folder is gone or the disk is read-only; likewise.
        """
        report_at = -math.inf
        while True:
            try:
                write()
                break
            except (DalsegnoError, NotDurable):
                raise
            except OSError as error:
                if error.errno in _FINAL:
                    raise
                self.obstacle = str(error)
            if (now := monotonic()) >= report_at:
                report_at = now + _REPORT_EVERY
                logger.error(
                    "the DiLoCo server cannot write: %s; workers wait until it can. Make room, or restore the folder's "
                    "permissions; if the disk is broken, stop the server, and start it with a copy of the folder",
                    self.obstacle,
                )
            if self._closing.wait(_PAUSE):
                raise Closing
        if self.obstacle is not None:
            logger.warning("the DiLoCo server can write again")
            self.obstacle = None
