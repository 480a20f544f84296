"""Tracker: the contract between dalsegno and one tracker's client, and the entries that a tracker receives.

A tracker runs on the sender's thread only. Any method may raise: the call is repeated later, with a new
connection. So ``open`` must find the run that an earlier process, or an earlier try, has begun.

==================  ===================================================================================================
``open(run)``       connects, and begins or continues the tracker's run ``run.id``
``has(entry)``      whether an earlier process's entry has arrived
``send(entries)``   hands over entries, in order; no :class:`Return` among them
``return_to``       goes back to a step, or marks that what follows belongs to a new timeline
``close(status)``   ends this leg's part of the run, so that everything handed over is stored
==================  ===================================================================================================
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from dalsegno.errors import StateMismatch
from dalsegno.events import contexts
from dalsegno.logs.values import drop_wall_clock, encode, from_json, to_json

TIMELINE = "dalsegno/timeline"
"""Series that marks returns: the number of the timeline, from the first point of each on."""

Status = Literal["finished", "failed", "killed"]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What identifies and describes the run."""

    id: str
    """The same over all legs: 16 hexadecimal digits of ``run.json``."""
    name: str
    directory: Path
    """For files that the client writes."""
    settings: Mapping[str, Any]
    """JSON values, without secrets."""
    code: Mapping[str, str]
    """Versions, and the git commit of the working directory."""


class Tracker(ABC):
    stores_at_once: bool = True
    """Whether an entry is stored once ``send`` has returned; else once ``close`` has."""

    @abstractmethod
    def open(self, run: TrackedRun) -> None: ...

    @abstractmethod
    def has(self, entry: Entry) -> bool: ...

    @abstractmethod
    def send(self, entries: Sequence[Entry]) -> None: ...

    @abstractmethod
    def close(self, status: Status) -> None: ...

    def return_to(self, point: Return) -> None:
        """Mark the return; for trackers that cannot forget points."""
        self.send([Points(point.step, point.time, {TIMELINE: point.timeline})])


# -- entries -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    step: int
    time: float
    """UTC seconds."""


@dataclass(frozen=True, slots=True)
class Points(Entry):
    """The numbers of one record."""

    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Text(Entry):
    tag: str
    text: str


@dataclass(frozen=True, slots=True)
class Histogram(Entry):
    tag: str
    edges: list[float]
    """One more than ``counts``, ascending."""
    counts: list[float]


@dataclass(frozen=True, slots=True)
class Card(Entry):
    """Model card of a checkpoint."""

    name: str
    """Name of the checkpoint."""
    text: str
    """Markdown."""


@dataclass(frozen=True, slots=True)
class Return(Entry):
    """The run has returned to ``step``: what follows belongs to a new timeline, whose number is ``timeline``."""

    timeline: int
    """From 2: the first return begins the second timeline."""


_KINDS: dict[str, type[Entry]] = {each.__name__.lower(): each for each in (Points, Text, Histogram, Card, Return)}
_NUMBERS = ("values", "edges", "counts")
"""Fields with floats that JSON has no numbers for."""


def replays(entry: Entry, earlier: Entry) -> bool:
    """Return whether the two contain the same, except for wall-clock fields."""
    if isinstance(entry, Points) and isinstance(earlier, Points):
        now, before = (encode(drop_wall_clock(each.values)) for each in (entry, earlier))
        return entry.step == earlier.step and now == before
    return replace(earlier, time=entry.time) == entry


def to_line(entry: Entry) -> bytes:
    return encode({"kind": type(entry).__name__.lower(), **asdict(entry)}) + b"\n"


def from_line(line: bytes) -> Entry:
    """Raises StateMismatch if the line is not an entry."""
    try:
        content = json.loads(line)
        kind = _KINDS[content.pop("kind")]
        return kind(**{name: from_json(value) if name in _NUMBERS else value for name, value in content.items()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateMismatch(f"not an entry of a tracker's outbox: {line[:100]!r}") from error


HIDDEN = "***"
_SECRET_NAME = re.compile(r"(api_?key|token|secret|password|passwd|credential)s?$", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)[^/\s@]+@")
_SHORTEST = 6
"""Shorter values of environment variables are not searched for: they occur by chance."""
_TIMEOUT_S = 5


def without_secrets(text: str) -> str:
    """Hide user and password in URLs, and the values of environment variables that are named like secrets."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST:
            text = text.replace(value, HIDDEN)
    return _USER_INFO.sub(f"{HIDDEN}@", text)


def public(value: Any, name: str = "") -> Any:
    """Return settings with the values hidden that are secrets, by their names or by :func:`without_secrets`."""
    if isinstance(value, Mapping):
        return {key: public(each, str(key)) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [public(each) for each in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and _SECRET_NAME.search(name) else without_secrets(value)


def code_versions() -> dict[str, str]:
    """Return versions of Python, torch and dalsegno, and the git commit of the script's repository, if it has one."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "dalsegno"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    directory = Path(main).absolute().parent if main else Path.cwd()
    if (commit := _git(directory, "rev-parse", "HEAD")) is not None:
        versions["git_commit"] = commit
        if (changes := _git(directory, "status", "--porcelain", "--untracked-files=no")) is not None:
            versions["git_changes"] = "yes" if changes else "no"
    return versions


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(directory), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or a file system that does not answer
        return None
    return done.stdout.strip()


def model_card(ctx: contexts.SaveContext) -> str:
    """Return step, best metric, newest numbers and settings of the checkpoint that was saved. No wall-clock times."""
    state = ctx.state
    facts: dict[str, Any] = {
        "checkpoint": ctx.path.name,
        "step": ctx.step,
        "epoch": round(state.epoch, 4),
        "best so far": "yes" if ctx.is_best else "no",
        "best metric": state.best_metric,
        "tokens": state.num_input_tokens_seen,
        "model": type(ctx.model).__name__,
    }
    settings = public(to_json(ctx.args.to_dict()))
    lines = [f"# {ctx.args.run_name or ctx.args.directory.name}, step {ctx.step}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items() if value is not None]
    lines += ["", "| setting | value |", "|---|---|"]
    lines += [f"| `{name}` | `{value}` |" for name, value in settings.items() if value is not None]
    return "\n".join(lines) + "\n"
