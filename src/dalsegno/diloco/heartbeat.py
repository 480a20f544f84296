"""Heartbeat: shows the server that a worker is alive, on a thread of its own."""

from __future__ import annotations

import logging
import threading

from dalsegno.errors import DalsegnoError

from .link import connect
from .options import WorkerOptions

logger = logging.getLogger("dalsegno")


class Heartbeat:
    """A request every ``heartbeat_interval`` seconds, until :meth:`stop`."""

    def __init__(self, worker_id: str, options: WorkerOptions) -> None:
        self._worker_id = worker_id
        self._options = options
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dalsegno-diloco-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a request in progress is not waited for."""
        self._ended.set()

    def _run(self) -> None:
        with connect(self._options) as client:
            while not self._ended.wait(self._options.heartbeat_interval):
                try:
                    client.heartbeat(self._worker_id)
                except DalsegnoError as error:
                    logger.debug("DiLoCo: heartbeat: %s", error)
