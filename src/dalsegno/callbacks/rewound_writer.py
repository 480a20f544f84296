"""RewoundWriter: a summary writer that is a callback, so that a resume rewinds what others wrote through it."""

from __future__ import annotations

from typing import Any

from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import Binder, Callback
from dalsegno.events.table import Event
from dalsegno.state import Handler


class RewoundWriter(Callback):
    """Base class of callbacks with methods of torch's ``SummaryWriter``."""

    _is_bound = False

    @property
    def is_bound(self) -> bool:
        """Whether it is among the callbacks of a run."""
        return self._is_bound

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        self._is_bound = True
        return super().bound_handlers(binder)


def check_rewound(owner: str, summary_writer: Any) -> None:
    """Refuse a :class:`RewoundWriter` that no run has among its callbacks: no resume would rewind it."""
    if isinstance(summary_writer, RewoundWriter) and not summary_writer.is_bound:
        raise ConfigurationError(
            f"{owner}: its summary_writer {summary_writer.key} is in no trainer's list of callbacks; "
            "callbacks=[writer, …]"
        )
