"""Names of runs: short and unique."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Named(Protocol):
    name: str
    path: Path


def name_of(path: Path) -> str:
    """Name of the run directory that ``path`` is or lies in; otherwise the file's stem."""
    path = path.resolve()
    if path.is_dir():
        return path.parent.name if path.name == "logs" else path.name
    if path.parent.name == "logs":
        return path.parent.parent.name
    return path.stem


def make_names_unique(runs: Sequence[Named]) -> None:
    """Prefix equal names with as many parent directories as needed; number equal names in the same directory."""
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
    """Whether two runs have the same name in different directories."""
    return run.name == other.name and above[id(run)] != above[id(other)]


def _above(run: Named) -> list[str]:
    """The directories above the one that names the run, outermost first."""
    path = run.path.resolve()
    name = run.name.split("/")
    parts = [*path.parts[1:-1], path.name if path.is_dir() else path.stem]
    while parts and parts[-len(name) :] != name:
        parts.pop()
    return parts[: -len(name)]
