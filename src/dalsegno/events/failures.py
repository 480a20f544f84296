"""Failures: of several exceptions one is raised, and the others are in its notes."""

from __future__ import annotations

from collections.abc import Sequence


def raise_first(failures: Sequence[BaseException]) -> None:
    """Raise the first of the exceptions, with a note of each other one; nothing if there is none."""
    if failures:
        note_failures(failures[0], failures[1:])
        raise failures[0]


def note_failures(error: BaseException, others: Sequence[BaseException]) -> None:
    """Add a note of each exception that was raised after ``error``, while its consequences were cleared up."""
    for other in others:
        error.add_note(f"and during teardown: {type(other).__name__}: {other}")
