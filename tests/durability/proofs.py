"""Kill healthy runs of every layout at random instants: no resumed leg may say that it differs: ``make proofs``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from dalsegno.callbacks import EMA, GradNormLogger, JsonLogger
from dalsegno.distributed import collectives
from dalsegno.testing import DataOrder, FaultPlan
from support import layouts
from support.layouts import LAYOUTS

from . import soak as on_disk
from .soak import STEPS, Tally

OF_TWO_RANKS = ("one", "ddp", "fsdp", "tp", "pp")
"""Layouts that need no more than two."""


def leg(layout: str, output_dir: Path, plan: FaultPlan | None, victim: int) -> None:
    """One process life of a run: dropout, average weights, a record every two steps, a checkpoint every four."""
    if plan is not None and collectives.rank() == victim:
        plan.arm()
    callbacks = JsonLogger(), GradNormLogger(), DataOrder(), EMA(decay=0.5)
    settings = {"max_steps": STEPS, "logging_steps": 2, "save_steps": 4, "save_total_limit": 2}
    layouts.trainer(output_dir, layout, *callbacks, dropout=0.1, **settings).train()


def soak(kills: int, layout: str, folder: Path, seed: int, say: Callable[[Tally], object]) -> Tally:
    """Kill runs of that layout until that many kills are done and the last run has come to its end."""
    ranks, _ = LAYOUTS[layout]
    return on_disk.soak(kills, ranks, folder / layout, seed, say, name=layout, leg=partial(leg, layout))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("layouts", nargs="*", default=OF_TWO_RANKS, help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--kills", type=int, default=300, help="in all; default: %(default)s")
    parser.add_argument("--seed", type=int, default=2026)
    options = parser.parse_args(arguments)
    tallies: list[Tally] = []
    for layout in options.layouts:
        with tempfile.TemporaryDirectory(prefix="dalsegno-proofs-") as folder:
            kills = -(-options.kills // len(options.layouts))
            tallies.append(soak(kills, layout, Path(folder), options.seed, say=lambda tally: None))
        print(on_disk.table(tallies[-1:]), flush=True)
    return on_disk.report(tallies)


if __name__ == "__main__":
    sys.exit(main())
