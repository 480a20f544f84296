"""Kill a small run that saves in memory at random instants; then count what has been lost: ``make memory``.

In half of the runs the first layer is frozen, and changed in the middle: both slots share its file, then another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dalsegno as ds
from dalsegno.distributed import collectives
from dalsegno.testing import FaultPlan
from support.listeners import Listener
from support.runs import busy_trainer

from . import soak as on_disk
from .soak import STEPS, Tally

FILES = (("/slot-", 60), ("/slot-", 15), (".partial", 15), ("logs/", 6), ("run.json", 8), ("checkpoints/", 45))


def leg(output_dir: Path, plan: FaultPlan | None, victim: int) -> None:
    """One process life of the run on each rank; one of them may be going to die."""
    prepared(output_dir, plan, victim).train()


def frozen_leg(output_dir: Path, plan: FaultPlan | None, victim: int) -> None:
    """One of a run with a frozen layer."""

    def change(ctx: Any) -> None:
        if ctx.state.global_step == STEPS // 2:
            ctx.model.layers[0].weight.data.mul_(1.5)

    trainer = prepared(output_dir, plan, victim, frozen=["layers.0"])
    trainer.add_callback(Listener({"on_step_end": change}, name="changes the frozen layer"))
    trainer.train()


def prepared(output_dir: Path, plan: FaultPlan | None, victim: int, frozen: Sequence[str] = ()) -> ds.Trainer:
    if plan is not None and collectives.rank() == victim:
        plan.arm()
    parallel = "none" if collectives.world_size() == 1 else "fsdp"
    return busy_trainer(output_dir, parallel, STEPS, frozen=frozen, save_steps=8, save_in_memory="Every(steps=1)")


def soak(kills: int, world_size: int, folder: Path, seed: int, say: Callable[[Tally], object]) -> Tally:
    """Kill runs of both kinds until that many kills are done and the last run of each has come to its end."""
    of_frozen = kills // 2
    tally = on_disk.soak(kills - of_frozen, world_size, folder / "all trained", seed, say, leg=leg, files=FILES)
    return tally + on_disk.soak(of_frozen, world_size, folder / "frozen", seed, say, leg=frozen_leg, files=FILES)


if __name__ == "__main__":
    sys.exit(on_disk.main(__doc__, soak, kills=300))
