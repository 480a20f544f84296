"""Kill a small run with SIGKILL, again and again, at random instants; then count what has been lost: ``make soak``.

Nothing may be lost, and no resumed leg may say that it differs from the one before it.

A third of the kills comes by the clock, at any moment from the start of a process to the time a whole run takes; the
others before a file operation and before a step drawn by lot, since a run spends little time in these. Whenever a run
gets to its end all the same, it is held against one that was never killed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from dalsegno.checkpoint import CheckpointManager, read_tensors
from dalsegno.distributed import collectives
from dalsegno.events.table import Event
from dalsegno.logs import RunFile, read_records
from dalsegno.testing import FaultPlan, Outcome, compare_runs, start_ranks
from support.runs import busy_trainer

STEPS = 24
LOGS = ("train.jsonl", "gradient_norms.jsonl")
PLACES = ("in a save", "in a log write", "in a prune", "elsewhere")


@dataclass(slots=True)
class Tally:
    """What has happened to the runs of one kind."""

    name: str
    places: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    from_memory: int = 0
    """Of the resumes."""
    waited: int = 0
    """Ranks that were about to connect to one that was lost, and waited for it until they were killed, too."""
    runs: int = 0
    lost_records: int = 0
    differing_bits: int = 0
    proofs: Counter[str] = field(default_factory=Counter)
    """Verdicts on the resumes; "none" of a leg that was killed before it had one."""
    alarms: list[str] = field(default_factory=list)
    """What a leg said of a difference, although nothing may differ."""
    differences: list[str] = field(default_factory=list)
    """A table for each run that has not come out the same."""

    @property
    def kills(self) -> int:
        return self.places.total()

    @property
    def is_flawless(self) -> bool:
        return not (self.lost_records or self.differing_bits or self.alarms or self.differences)

    def __add__(self, other: Tally) -> Tally:
        """Of the runs of both."""
        return Tally(
            self.name,
            self.places + other.places,
            self.resumes + other.resumes,
            self.from_memory + other.from_memory,
            self.waited + other.waited,
            self.runs + other.runs,
            self.lost_records + other.lost_records,
            self.differing_bits + other.differing_bits,
            self.proofs + other.proofs,
            self.alarms + other.alarms,
            self.differences + other.differences,
        )


Leg = Callable[[Path, FaultPlan | None, int], None]
"""One process life of a run, on each rank: its directory, when it is killed, and which rank is."""


def leg(output_dir: Path, plan: FaultPlan | None, victim: int) -> None:
    """One process life of the run on each rank; one of them may be going to die."""
    if plan is not None and collectives.rank() == victim:
        plan.arm()
    busy_trainer(output_dir, "none" if collectives.world_size() == 1 else "fsdp", STEPS).train()


FILES = ((".partial", 30), ("logs/", 6), ("run.json", 8), ("checkpoints/", 45))
"""Parts of paths, and up to which of their operations a run is killed."""


def plans(dice: random.Random, longest: float, files: Sequence[tuple[str, int]] = FILES) -> Iterator[FaultPlan]:
    """Moments to die at, without end. ``longest``: seconds that a whole run takes."""
    while True:
        yield FaultPlan(seconds=dice.uniform(0.0, longest))
        path, often = dice.choice(files)
        yield FaultPlan(operation="any", path=path, count=dice.randint(1, often))
        yield FaultPlan(event=Event.STEP_BEGIN, count=dice.randint(1, STEPS // 2))


def soak(
    kills: int,
    world_size: int,
    folder: Path,
    seed: int,
    say: Callable[[Tally], object],
    *,
    name: str | None = None,
    leg: Leg = leg,
    files: Sequence[tuple[str, int]] = FILES,
) -> Tally:
    """Kill runs until that many kills are done and the last run has come to its end."""
    tally, dice = Tally(name or f"{world_size} rank{'s' * (world_size > 1)}"), random.Random(seed)
    began = time.monotonic()
    survive(folder / "reference", None, world_size, 0, leg)
    moments = plans(dice, time.monotonic() - began, files)
    while tally.kills < kills:
        output_dir = folder / f"run-{tally.runs}"
        while True:
            plan = next(moments) if tally.kills < kills else None
            victim = dice.randrange(world_size)
            outcomes = survive(output_dir, plan, world_size, victim, leg)
            if not outcomes[victim].was_killed:
                break
            tally.waited += sum(each.exit_code == -signal.SIGKILL for each in outcomes) - 1
            tally.places[place_of(output_dir, plan)] += 1
            say(tally)
        hold_against(folder / "reference", output_dir, tally)
        shutil.rmtree(output_dir)
    return tally


def survive(output_dir: Path, plan: FaultPlan | None, world_size: int, victim: int, leg: Leg) -> list[Outcome]:
    """How each rank came to the run's end, or to its own."""
    outcomes = start_ranks(leg, world_size, output_dir, plan, victim).wait()
    if plan is None or not outcomes[victim].was_killed:
        for outcome in outcomes:
            assert outcome.exit_code == 0, f"rank {outcome.rank} ended with {outcome.exit_code}\n{outcome.error}"
    return outcomes


def place_of(output_dir: Path, plan: FaultPlan | None) -> str:
    """Where it was killed, as far as its folder tells: a hidden checkpoint is being written, or being deleted."""
    folder = output_dir / "checkpoints"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    newest = max((name for name in names if "." not in name), default="")
    for hidden in (name for name in names if name.endswith(".partial")):
        return "in a prune" if hidden < newest else "in a save"
    return "in a log write" if plan is not None and plan.path == "logs/" else "elsewhere"


def hold_against(reference: Path, run: Path, tally: Tally) -> None:
    tally.runs += 1
    legs = RunFile(run).load()
    assert legs is not None
    tally.resumes += len(legs.legs) - 1
    tally.from_memory += sum((each.from_checkpoint or "").startswith("/") for each in legs.legs)
    for proof in (each.resumed for each in legs.legs if each.from_checkpoint is not None):
        tally.proofs["none" if proof is None else proof.verdict] += 1
        if proof is not None and proof.verdict in ("differs", "changed"):
            tally.alarms.append(proof.line)
    tally.lost_records += sum((records(reference) - records(run)).values()) + sum(
        (records(run) - records(reference)).values()
    )
    tally.differing_bits += differing_bits(reference, run)
    comparison = compare_runs(reference, run)
    if not comparison.identical:
        tally.differences.append(comparison.table())


def records(run: Path) -> Counter[tuple[str, object, object]]:
    return Counter(
        (name, record.get("global_step"), record.get("kind"))
        for name in LOGS
        for record in read_records(run / "logs" / name)
    )


def differing_bits(first: Path, second: Path) -> int:
    """In weights and optimizer state."""
    ours, theirs = (flat(run) for run in (first, second))
    assert ours.keys() == theirs.keys()
    return sum(int(np.bitwise_count(ours[name] ^ theirs[name]).sum()) for name in ours)


def flat(run: Path) -> dict[str, np.ndarray]:
    newest = CheckpointManager(run).find()
    assert newest is not None
    return {
        f"{component}.{name}": tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        for component, tensors in read_tensors(newest).items()
        for name, tensor in tensors.items()
    }


def table(tallies: list[Tally]) -> str:
    rows = [("", *(tally.name for tally in tallies), "all")]

    def row(title: str, value: Callable[[Tally], int]) -> None:
        values = [value(tally) for tally in tallies]
        rows.append((title, *(f"{each:,}" for each in [*values, sum(values)])))

    row("kills", lambda tally: tally.kills)
    for place in PLACES:
        row(f"  {place}", lambda tally, place=place: tally.places[place])  # type: ignore[misc]
    row("resumes", lambda tally: tally.resumes)
    if any(tally.from_memory for tally in tallies):
        row("  from memory", lambda tally: tally.from_memory)
    if any(tally.waited for tally in tallies):
        row("ranks that waited for a lost one", lambda tally: tally.waited)
    for verdict in ("exact", "not proven", "none"):
        row(f"  proof: {verdict}", lambda tally, verdict=verdict: tally.proofs[verdict])  # type: ignore[misc]
    row("false alarms", lambda tally: len(tally.alarms))
    row("runs brought to their end", lambda tally: tally.runs)
    row("lost records", lambda tally: tally.lost_records)
    row("differing bits", lambda tally: tally.differing_bits)
    row("runs that differ anywhere", lambda tally: len(tally.differences))
    return "\n".join(f"{first:<34}" + "".join(f"{each:>10}" for each in rest) for first, *rest in rows)


def main(description: str | None = __doc__, soak: Callable[..., Tally] = soak, kills: int = 1000) -> int:
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=kills, help="in all; a quarter of them with two ranks")
    parser.add_argument("--seed", type=int, default=2026)
    arguments = parser.parse_args()

    def say(tally: Tally) -> None:
        if tally.kills % 50 == 0:
            print(f"{tally.kills} kills, {tally.runs} runs ended ({tally.name})", flush=True)

    tallies = []
    with tempfile.TemporaryDirectory(prefix="dalsegno-soak-") as folder:
        for world_size, share in ((1, arguments.kills - arguments.kills // 4), (2, arguments.kills // 4)):
            place = Path(folder) / str(world_size)
            tallies.append(soak(share, world_size, place, arguments.seed + world_size, say))
    return report(tallies)


def report(tallies: list[Tally]) -> int:
    """Print what has happened. Returns the exit status."""
    print(table(tallies))
    for tally in tallies:
        print("".join(f"\n{each}\n" for each in [*tally.alarms, *tally.differences]), end="")
    return 0 if all(tally.is_flawless for tally in tallies) else 1


if __name__ == "__main__":
    sys.exit(main())
