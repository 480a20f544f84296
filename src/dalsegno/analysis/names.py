"""What runs are called: as short as it goes, and no two of them alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Named(Protocol):
    name: str
    path: Path


def name_of(path: Path) -> str:
    """The run's folder, where the path leads into one; the file otherwise."""
    path = path.resolve()
    if path.is_dir():
        return path.parent.name if path.name == "logs" else path.name
    if path.parent.name == "logs":
        return path.parent.parent.name
    return path.stem


def tell_apart(runs: Sequence[Named]) -> None:
    """Put so many of the folders above before names that are the same; number those that lie in one place."""
    above = {id(run): _above(run) for run in runs}
    while alike := [run for run in runs if any(_alike(run, other, above) for other in runs)]:
        for run in alike:
            if folders := above[id(run)]:
                run.name = f"{folders.pop()}/{run.name}"
    seen: Counter[str] = Counter()
    for run in runs:
        seen[run.name] += 1
        if seen[run.name] > 1:
            run.name = f"{run.name} ({seen[run.name]})"


def _alike(run: Named, other: Named, above: Mapping[int, list[str]]) -> bool:
    """Whether they have one name and lie in different places."""
    return run.name == other.name and above[id(run)] != above[id(other)]


def _above(run: Named) -> list[str]:
    """The folders in which what gives the run its name lies, from the outermost."""
    path = run.path.resolve()
    name = run.name.split("/")
    parts = [*path.parts[1:-1], path.name if path.is_dir() else path.stem]
    while parts and parts[-len(name) :] != name:
        parts.pop()
    return parts[: -len(name)]
