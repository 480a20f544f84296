"""Callbacks for tests: what fired, in which order, with what."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import dalsegno as ds
from dalsegno.events.table import Event

Handler = Callable[[Any], Any]


class Listener(ds.Callback):
    """Handlers given as functions, under their names."""

    def __init__(self, handlers: dict[str, Handler], name: str | None = None) -> None:
        self.name = name
        for handler, function in handlers.items():
            setattr(self, handler, MethodType(lambda _, ctx, function=function: function(ctx), self))


class Journal(ds.Callback):
    """Writes down the name of each event that fires, and what ``note`` says about it."""

    def __init__(self, note: Handler | None = None, without: tuple[str, ...] = ()) -> None:
        self.fired: list[str] = []
        self.notes: list[Any] = []
        for event in Event:
            if event.handler not in without:
                setattr(self, event.handler, self._entry(event.handler.removeprefix("on_"), note))

    def _entry(self, event: str, note: Handler | None) -> Handler:
        def write(ctx: Any) -> None:
            self.fired.append(event)
            if note is not None:
                self.notes.append((event, note(ctx)))

        return write


class Trace(ds.Callback):
    """A counter of steps with state, so that a resume shows."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.steps = 0

    def on_step_end(self, ctx: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]
