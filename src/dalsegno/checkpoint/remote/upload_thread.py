"""Courier: the thread that sends a run elsewhere during one leg."""

from __future__ import annotations

import logging
import threading
import time

from dalsegno.errors import Locked
from dalsegno.system.worker import lower_thread_priority

from .lock import RemoteLock
from .upload import Uploader

logger = logging.getLogger("dalsegno")

PATIENCE = 60.0
"""Seconds that leaving waits while nothing at all is sent."""

_SAY_EVERY = 5.0  # seconds
_LONGEST_PAUSE = 60.0  # seconds from one attempt to the next


class UploadThread:
    """Sends whatever is new each time it is woken, and tries again what has failed.

    Args:
        uploader: knows what is to be sent, and says how far it is.
        claim: nothing is sent where another one has taken over.
        step: the leg goes on from there; None: from nothing.
    """

    def __init__(self, uploader: Uploader, claim: RemoteLock, step: int | None) -> None:
        self._uploader = uploader
        self._claim = claim
        uploader.moved = self._advance
        self._step = step
        self._awake = threading.Event()
        self._awake.set()
        self._is_leaving = self._is_given_up = self._has_left_behind = False
        self._failures = 0  # in a row
        self._sent = 0  # bytes
        self._moved = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="dalsegno-upload", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Something is new. From any thread."""
        self._awake.set()

    def finish(self) -> None:
        """Wait until everything is sent, as long as something moves; give up after that, or if this is broken off."""
        self._is_leaving, self._moved = True, time.monotonic()
        self._awake.set()
        said = time.monotonic()
        try:
            while self._thread.is_alive() and time.monotonic() - self._moved < PATIENCE:
                self._thread.join(0.2)
                if self._thread.is_alive() and time.monotonic() - said > _SAY_EVERY:
                    said = time.monotonic()
                    logger.warning("waiting for %s: %.3f GB sent in this leg", self._uploader.url, self._sent / 1e9)
        finally:
            self._is_given_up = True
            self._awake.set()
        if missing := self._uploader.missing():
            logger.error(
                "%s: could not be sent: %s; the next leg on this host sends what is in %s",
                self._uploader.url,
                ", ".join(missing),
                self._uploader.run,
            )

    # -- on the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        lower_thread_priority()
        pause = None
        while True:
            self._awake.wait(pause)
            self._awake.clear()
            if self._is_given_up:
                return
            is_leaving = self._is_leaving
            try:
                self._send(is_leaving)
            except Locked as error:
                logger.error("%s; nothing more is sent from here", error)
                return
            except Exception as error:  # whatever a filesystem of others raises: training goes on
                self._note_failure(error)
                pause = 1.0 if is_leaving else min(_LONGEST_PAUSE, 2.0 ** min(self._failures, 10))
                continue
            pause, self._failures = None, 0
            if is_leaving:
                return

    def _send(self, is_leaving: bool) -> None:
        self._claim.check()
        if not self._has_left_behind:
            self._uploader.archive_timeline(self._step)
            self._has_left_behind = True
        self._uploader.sync()
        if is_leaving:
            self._uploader.sync_rest()

    def _advance(self, count: int) -> None:
        if self._is_given_up:
            raise InterruptedError("nobody waits for it any longer")
        self._sent += count
        self._moved = time.monotonic()

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1 and not self._is_given_up:
            kind = type(error).__name__
            logger.warning(
                "%s: could not be written to (%s: %s); it is tried again, and training goes on",
                self._uploader.url,
                kind,
                error,
            )
