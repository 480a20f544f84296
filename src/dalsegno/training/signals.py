"""SignalWatcher: turns signals into requests to stop. A signal handler records the signal, and does nothing else.

The ranks find the recorded signal when they synchronize, between two steps or two batches of an evaluation; then all of
them stop, save and return. A second Ctrl-C raises ``KeyboardInterrupt`` at once.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dalsegno.state import NO_REQUESTS, ControlRequests, TrainerControl

logger = logging.getLogger("dalsegno")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class SignalWatcher:
    """Records :data:`SIGNALS` while :meth:`listening`, and requests a stop once one has arrived."""

    def __init__(self, control: TrainerControl) -> None:
        self._control = control
        self._recorded: list[signal.Signals] = []
        self._previous: dict[signal.Signals, Any] = {}  # handlers that ours replace

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside; restore the previous handlers afterwards.

        A recorded signal is raised again at the end if the program had its own handler for it (``scontrol requeue``,
        say). A signal that the program ignores stays ignored. Python handles signals on the main thread only: on
        another thread, nothing is handled.
        """
        global _listening
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        present = {number: signal.getsignal(number) for number in SIGNALS}
        self._previous = {number: each for number, each in present.items() if each not in (None, signal.SIG_IGN)}
        self._recorded = []
        outer, _listening = _listening, self
        for number in self._previous:
            signal.signal(number, self._record)
        try:
            yield
        finally:
            _listening = outer
            self._restore()
        for number in dict.fromkeys(self._recorded):
            if self._previous[number] not in (signal.SIG_DFL, signal.default_int_handler):
                signal.raise_signal(number)

    def poll(self) -> ControlRequests:
        """Request a stop, once a signal has arrived."""
        if not self._recorded:
            return NO_REQUESTS
        first = self._recorded[0]
        if first is signal.SIGINT and not self._control.should_training_stop:
            logger.warning("SIGINT: training ends here, with a checkpoint; press Ctrl-C again to end without one")
        self._control.stop(first.name, by="signal")
        return ControlRequests(stop=True)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and signal.SIGINT in self._recorded:
            raise KeyboardInterrupt
        self._recorded.append(signal.Signals(number))

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._record:  # else the program has set another handler since
                signal.signal(number, handler)


_listening: SignalWatcher | None = None


def _restore_in_child() -> None:
    """A process that is forked during training is another program: a signal to it must not stop the run."""
    if _listening is not None:
        _listening._restore()


os.register_at_fork(after_in_child=_restore_in_child)
