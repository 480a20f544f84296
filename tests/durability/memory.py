"""Kill a small run that saves in memory at random instants; then count what has been lost: ``make memory``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from dalsegno.distributed import collectives
from dalsegno.testing import FaultPlan
from support.runs import busy_trainer

from . import soak as on_disk
from .soak import STEPS, Tally

FILES = (("/slot-", 60), ("/slot-", 15), (".partial", 15), ("logs/", 6), ("run.json", 8), ("checkpoints/", 45))


def leg(output_dir: Path, plan: FaultPlan | None, victim: int) -> None:
    """One process life of the run on each rank; one of them may be going to die."""
    if plan is not None and collectives.rank() == victim:
        plan.arm()
    parallel = "none" if collectives.world_size() == 1 else "fsdp"
    busy_trainer(output_dir, parallel, STEPS, save_steps=8, save_in_memory="Every(steps=1)").train()


def soak(kills: int, world_size: int, folder: Path, seed: int, say: Callable[[Tally], object]) -> Tally:
    """Kill runs until that many kills are done and the last run has come to its end."""
    return on_disk.soak(kills, world_size, folder, seed, say, leg=leg, files=FILES)


if __name__ == "__main__":
    sys.exit(on_disk.main(__doc__, soak, kills=300))
