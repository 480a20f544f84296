"""StandIn: base of objects that stand in for another library's. Reading an attribute without a counterpart raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from dalsegno.state import TrainerState


class StandIn:
    """Reading an attribute without a counterpart raises an AttributeError that lists those that exist."""

    _stands_for: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        present = getattr(type(self), name, None)
        if isinstance(present, property):  # it has raised an AttributeError itself: raise that again
            return present.__get__(self)
        known = sorted(each for each in dir(self) if not each.startswith("_"))
        raise AttributeError(
            f"{self._stands_for}.{name}: dalsegno has no counterpart of it; available: {', '.join(known)}"
        )


def reads(path: str) -> Any:
    """A property of an object that has the same value under another path, such as ``_state.global_step``."""
    return property(attrgetter(path))


class TrainerStandIn(StandIn):
    """Stands in for ``trainer``, whose progress is that of ``self._state``."""

    _stands_for = "trainer"

    def __init__(self, state: TrainerState) -> None:
        self._state = state

    @contextmanager
    def as_of(self, state: TrainerState) -> Iterator[None]:
        """Have the progress of ``state`` inside: that of a checkpoint, which may be of an earlier step."""
        live, self._state = self._state, state
        try:
            yield
        finally:
            self._state = live
