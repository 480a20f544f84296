"""Interrupts: the signals that ask for the end of training. A handler notes that one came, and does nothing else.

What has been noted is found where the ranks agree, between two steps or two batches of an evaluation; then all of them
stop there, save, and leave. A second Ctrl-C does not wait for that: it is a ``KeyboardInterrupt`` where it comes.
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
    """Notes :data:`SIGNALS` while it is :meth:`listening`, and wishes to stop once it has."""

    def __init__(self, control: TrainerControl) -> None:
        self._control = control
        self._noted: list[signal.Signals] = []
        self._former: dict[signal.Signals, Any] = {}  # the handlers in whose place ours are

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside; afterwards they are handled as before.

        A handler of the program's own is called when all is done, for a signal that it would have been given before
        (``scontrol requeue``, say). A signal that the program ignores stays ignored. Handlers are the main thread's
        affair: on another one, nothing is handled.
        """
        global _listening
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        present = {number: signal.getsignal(number) for number in SIGNALS}
        self._former = {number: each for number, each in present.items() if each not in (None, signal.SIG_IGN)}
        self._noted = []
        outer, _listening = _listening, self
        for number in self._former:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            _listening = outer
            self._restore()
        for number in dict.fromkeys(self._noted):
            if self._former[number] not in (signal.SIG_DFL, signal.default_int_handler):
                signal.raise_signal(number)

    def poll(self) -> ControlRequests:
        """A wish to stop, once a signal has come."""
        if not self._noted:
            return NO_REQUESTS
        first = self._noted[0]
        if first is signal.SIGINT and not self._control.should_training_stop:
            logger.warning("SIGINT: training ends here, with a checkpoint; press Ctrl-C again to end without one")
        self._control.stop(first.name, by="signal")
        return ControlRequests(stop=True)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and signal.SIGINT in self._noted:
            raise KeyboardInterrupt
        self._noted.append(signal.Signals(number))

    def _restore(self) -> None:
        for number, handler in self._former.items():
            if signal.getsignal(number) == self._note:  # else somebody has set another one meanwhile
                signal.signal(number, handler)


_listening: SignalWatcher | None = None


def _restore_in_child() -> None:
    """A process that is forked during the training is another program: what ends it is no wish to stop ours."""
    if _listening is not None:
        _listening._restore()


os.register_at_fork(after_in_child=_restore_in_child)
