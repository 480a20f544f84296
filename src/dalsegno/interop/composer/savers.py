"""Savers: the ``CheckpointSaver`` callbacks of Composer's Trainer, which save when callbacks request it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from dalsegno.interop.wrapping import wrap


class Savers:
    """Asked by Composer after each step and epoch whether to save; adds requests to what each answers.

    Args:
        callbacks: of Composer's state.
        announce: called before a checkpoint is saved; may set :attr:`is_forbidden`.
    """

    def __init__(self, callbacks: list[Any], announce: Callable[[], None]) -> None:
        self.is_due = False
        """Whether to save at the end of this step."""
        self.is_forbidden = False
        """Whether no more checkpoint is to be saved."""
        self._savers = [each for each in callbacks if callable(getattr(each, "save_interval", None))]
        self._announce = announce
        self._installed = ExitStack()

    @property
    def exist(self) -> bool:
        return bool(self._savers)

    def install(self) -> None:
        """Take part in the savers' decisions, until :meth:`remove`."""
        for saver in self._savers:
            self._installed.callback(wrap(saver, "save_interval", self._decide))

    def remove(self) -> None:
        self._installed.close()

    def _decide(self, original: Callable[[Any, Any], bool], state: Any, event: Any) -> bool:
        is_due = original(state, event) or (self.is_due and event.value == "batch_checkpoint")
        if is_due and not self.is_forbidden:
            self._announce()
        return is_due and not self.is_forbidden
