"""Writes into its page which events a user's loop cannot fire, and which built-in callbacks need one of them:
``python docs/guides/own-loop.py``. A test compares page and code."""

from __future__ import annotations

from pathlib import Path

from dalsegno import callbacks
from dalsegno.events.callback import Callback
from dalsegno.training.run import UNSUPPORTED_EVENTS

PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- written by docs/guides/own-loop.py -->\n", "<!-- end -->\n"


def table() -> str:
    """Return the table: events in the order of firing, callbacks alphabetically."""
    rows = [
        ("events that are not fired", [event.handler for event in UNSUPPORTED_EVENTS]),
        ("built-ins that are refused", [name for name in callbacks.__all__ if needs_more(getattr(callbacks, name))]),
        ("built-ins that work", [name for name in callbacks.__all__ if not needs_more(getattr(callbacks, name))]),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {listed(names)} |" for what, names in rows)]) + "\n"


def needs_more(kind: type[Callback]) -> bool:
    return any(getattr(kind, event.handler) is not getattr(Callback, event.handler) for event in UNSUPPORTED_EVENTS)


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def pages() -> dict[Path, str]:
    """Return the page with the current table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return {PAGE: before + BEGIN + table() + END + after}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
