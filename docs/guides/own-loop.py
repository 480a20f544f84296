"""Writes into its page which events a user's loop cannot fire, and which built-in callbacks need one of them:
``python docs/guides/own-loop.py``. A test compares page and code."""

from __future__ import annotations

import sys
from pathlib import Path

from dalsegno import callbacks
from dalsegno.events.callback import Callback
from dalsegno.training.run import UNSUPPORTED_EVENTS

sys.path.insert(0, str(Path(__file__).parents[1]))

from written import page_with, write


def table() -> str:
    """Return the table: events in the order of firing, callbacks alphabetically."""
    rows = [
        ("events that are not fired", [event.handler for event in UNSUPPORTED_EVENTS]),
        ("built-ins that are refused", [name for name in callbacks.__all__ if needs_more(getattr(callbacks, name))]),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {listed(names)} |" for what, names in rows)]) + "\n"


def needs_more(kind: type[Callback]) -> bool:
    needed = UNSUPPORTED_EVENTS.keys() - {*kind.optional_events}
    return any(getattr(kind, event.handler) is not getattr(Callback, event.handler) for event in needed)


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def pages() -> dict[Path, str]:
    """Return the page with the current table."""
    return page_with(table(), __file__)


if __name__ == "__main__":
    write(pages())
