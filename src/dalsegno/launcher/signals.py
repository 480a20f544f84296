"""ForwardedSignals: signals to the launcher, kept for its ranks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from dalsegno.training.stopping import SIGNALS


class ForwardedSignals:
    """Records signals while ranks run, for the agent to forward. While none run, a signal ends the agent.

    A signal that the program ignores stays ignored, by the ranks too. Python handles signals on the main thread only:
    on another thread, nothing is handled.
    """

    def __init__(self) -> None:
        self.forwarded: list[signal.Signals] = []
        """Those that :meth:`take` has returned."""
        self._pending: list[signal.Signals] = []
        self._raises = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside; restore the previous handlers afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in previous.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._record)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """No ranks run inside: a signal, also one that is pending, raises SignalException."""
        self._raises = True
        try:
            self._raise_pending()
            yield
        finally:
            self._raises = False

    def take(self) -> list[signal.Signals]:
        """The signals that have arrived since the last call."""
        taken, self._pending = self._pending, []
        self.forwarded += taken
        return taken

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._pending.append(signal.Signals(number))
        if self._raises:
            self._raise_pending()

    def _raise_pending(self) -> None:
        for first in self.take():
            raise SignalException(f"{first.name} arrived while no ranks ran", first)
