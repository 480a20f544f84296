"""Journal: ``control.jsonl``, which records each command when it is accepted, and the step at which it takes effect.

A command is part of the run: a leg that resumes from a checkpoint before the command's step repeats it from here. So
a line is on disk before the caller continues. The kinds of lines, which are only appended:

* ``accepted``: a command, from whom;
* ``acted``: at which step it takes effect, and what the script gave for the settings that it changes;
* ``dropped``: it will not take effect, and why;
* ``overridden``: settings of the command that no longer apply, since the script or a later command changed them;
* ``rewound``: the user went back to an older checkpoint, so commands after its step are of an abandoned timeline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from dalsegno.stateful.schema import Count

from .line_file import LineFile, parser_of

logger = logging.getLogger("dalsegno")

JOURNAL = "control.jsonl"


@dataclass(slots=True)
class JournalEntry:
    """A command in the journal, and what became of it."""

    id: str
    time: float
    """When it was accepted, in UTC seconds."""
    by: str
    """Who sent it."""
    command: str
    data: dict[str, Any]
    step: int | None = None
    """The step at whose end it took effect."""
    script: dict[str, Any] = field(default_factory=dict)
    """What the user's script gave then for the settings that it changes."""
    overridden: list[str] = field(default_factory=list)
    """Settings that no longer apply."""
    error: str | None = None
    """Why it does not take effect, or why that no longer counts."""

    def __str__(self) -> str:
        return in_words(self.command, self.data)

    @property
    def is_pending(self) -> bool:
        """Whether it has neither taken effect nor been dropped."""
        return self.step is None and self.error is None


def in_words(command: str, data: Mapping[str, Any]) -> str:
    """``set learning_rate=×0.5``."""
    values = ", ".join(f"{name}={value_in_words(value)}" for name, value in data.items())
    return f"{command} {values}" if values else command


def value_in_words(value: Any) -> str:
    """``×0.5``, ``0.0003``."""
    if isinstance(value, Mapping) and "factor" in value:
        return f"×{value_in_words(value['factor'])}"
    return f"{value:g}" if isinstance(value, float) else str(value)[:80]


class _Accepted(TypedDict):
    id: str
    time: float
    by: str
    command: str
    data: dict[str, Any]


class _Acted(TypedDict):
    id: str
    time: float
    step: Count
    script: dict[str, Any]


class _Dropped(TypedDict):
    id: str
    time: float
    error: str


class _Overridden(TypedDict):
    id: str
    time: float
    settings: list[str]


class _Rewound(TypedDict):
    time: float
    step: Count


_FORMS: Mapping[str, Any] = {
    "accepted": _Accepted,
    "acted": _Acted,
    "dropped": _Dropped,
    "overridden": _Overridden,
    "rewound": _Rewound,
}


class Journal:
    """``control.jsonl`` of an ``output_dir``. Written by rank 0 of the run that holds the directory's lock.

    The methods that write raise OSError, say on a full disk; no part of their lines stays in the file then.
    """

    def __init__(self, output_dir: Path) -> None:
        self._file = LineFile(output_dir / JOURNAL, parser_of(_FORMS))
        self.path = self._file.path

    def read(self) -> list[JournalEntry]:
        """Return the commands: those that took effect in the order of doing so, then all others as accepted.

        A line that is torn, damaged, or of a kind that a newer version writes is skipped with a warning.
        """
        entries: dict[str, JournalEntry] = {}
        acted: dict[str, JournalEntry] = {}
        for kind, line in self._file.read():
            if kind == "accepted":
                entries[line["id"]] = JournalEntry(**line)
            elif kind == "rewound":
                abandon(entries.values(), line["step"])
            elif (entry := entries.get(line["id"])) is None:
                logger.warning("%s: %s names an unknown command, %r", self.path, kind, line["id"][:40])
            elif kind == "acted":
                entry.step, entry.script = line["step"], line["script"]
                acted[entry.id] = entry
            elif kind == "overridden":
                entry.overridden += line["settings"]
            else:
                entry.error = line["error"]
        return [*acted.values(), *(entry for entry in entries.values() if entry.id not in acted)]

    def accept(self, entry: JournalEntry) -> None:
        """Record that a command is accepted."""
        self._file.append([{"kind": "accepted", **{name: getattr(entry, name) for name in _Accepted.__annotations__}}])

    def act(self, entries: Iterable[JournalEntry], step: int) -> None:
        """Record at which step commands take effect, before they do."""
        self._file.append(_now("acted", id=entry.id, step=step, script=entry.script) for entry in entries)

    def drop(self, errors: Mapping[str, str]) -> None:
        """Record why the commands of these ids do not take effect."""
        self._file.append(_now("dropped", id=id_, error=error) for id_, error in errors.items())

    def override(self, settings: Mapping[str, Sequence[str]]) -> None:
        """Record, by id, the settings of a command that no longer apply."""
        self._file.append(_now("overridden", id=id_, settings=[*names]) for id_, names in settings.items())

    def rewind(self, step: int) -> None:
        """Record that what came after ``step`` is of an abandoned timeline."""
        if self.path.exists():
            self._file.append([_now("rewound", step=step)])


def _now(kind: str, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time.time(), **values}


def abandon(entries: Iterable[JournalEntry], step: int) -> None:
    """Mark the commands that are of an abandoned timeline, since the user went back to ``step``."""
    for entry in entries:
        if entry.error is None and (entry.step is None or entry.step > step):
            entry.error = f"the run was taken back to step {step}"
