"""Scenario: a run with something of its own, what it is interrupted by, and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from dalsegno.testing import Pattern, Trial, check_resume_thoroughly
from dalsegno.testing.equivalence import Trains
from dalsegno.testing.thorough_check import How

SHOWN = Path(__file__).with_name("shown.json")

DATA, MODEL, OPTIMIZER = "Data", "Model and loss", "Optimizer and schedule"
CALLBACKS, LOOP, CHANGED, LATE = "Callbacks", "Your own loop", "Changed between two legs", "Takes effect later"
HEALTHY = "All in the checkpoint"
GROUPS = (HEALTHY, DATA, MODEL, OPTIMIZER, CALLBACKS, LOOP, CHANGED, LATE)

WAYS: dict[str, How] = {"killed": "kill", "stopped": "stop"}
"""By SIGKILL three steps after a checkpoint, and by SIGTERM, which saves one."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A function that builds the run in a folder, as a user's script does; its docstring says what is special."""

    group: str
    build: Callable[[Path], Trains]
    ranks: int = 1
    ways: Collection[str] = tuple(WAYS)

    @property
    def name(self) -> str:
        return self.build.__name__.replace("_", " ")

    @property
    def what(self) -> str:
        return (self.build.__doc__ or "").removesuffix(".")

    def pattern(self, way: str) -> Pattern:
        """Interrupted within the first epoch and at the end of the second; what changes once, once."""
        how = WAYS[way]
        return ((("inside", how),), (("end", how),))[: 1 if self.group == CHANGED else 2]


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    group: str, *, ranks: int = 1, ways: Collection[str] = tuple(WAYS)
) -> Callable[[Callable[[Path], Trains]], Callable[[Path], Trains]]:
    """Decorates the function of a scenario."""

    def add(build: Callable[[Path], Trains]) -> Callable[[Path], Trains]:
        one = Scenario(group, build, ranks, ways)
        SCENARIOS[one.name] = one
        return build

    return add


@dataclass(frozen=True, slots=True)
class Build:
    """What the processes of a leg get: the name of a scenario, which each of them builds anew."""

    name: str

    def __call__(self, output_dir: Path) -> Trains:
        torch.manual_seed(0)
        return SCENARIOS[self.name].build(output_dir)


def outcomes(name: str, folder: Path, ways: Collection[str] = tuple(WAYS)) -> dict[str, Trial]:
    """What becomes of a scenario, by the way in which it is interrupted."""
    one = SCENARIOS[name]
    wanted = [way for way in ways if way in one.ways]
    trials = check_resume_thoroughly(
        Build(name),
        folder=folder,
        world_sizes=[one.ranks],
        patterns=[one.pattern(way) for way in wanted],
        find_out_which=False,
        timeout=120.0,
    )
    return dict(zip(wanted, trials, strict=True))


def shown() -> dict[str, dict[str, str]]:
    """What has been shown so far: verdicts by scenario, and by the way in which it was interrupted."""
    found: dict[str, dict[str, str]] = json.loads(SHOWN.read_text()) if SHOWN.exists() else {}
    return found


def write(found: dict[str, dict[str, str]]) -> None:
    """Add to what has been shown; what is no scenario any more is left out."""
    known = shown() | found
    kept = {name: known[name] for name in SCENARIOS if name in known}
    SHOWN.write_text(json.dumps(kept, indent=1) + "\n")
