"""What it takes to list a thousand checkpoints: the whole command, from start to exit, beside listing a single one."""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from torch import nn

from dalsegno.checkpoint import CheckpointManager, Manifest, ModelState

from .processes import seconds_of
from .row import Row, duration
from .timing import figure, in_turns

MANY = 1_000
ROUNDS = 7
LIMIT = 1.0

SMALL = {"many": 3, "rounds": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""

COMMAND = [str(Path(sys.executable).with_name("dalsegno")), "checkpoints", "list"]


def run(many: int = MANY, rounds: int = ROUNDS) -> list[Row]:
    with tempfile.TemporaryDirectory() as temporary:
        one, all_of_them = Path(temporary) / "one", Path(temporary) / "many"
        CheckpointManager(one).save(1, [ModelState(nn.Linear(8, 8))], [], metrics={"eval_loss": 2.5})
        for step in range(1, many + 1):
            _copy(one / "checkpoints/step-00000001", all_of_them / f"checkpoints/step-{step:08d}", step)
        listings = {folder.name: seconds_of([*COMMAND, str(folder)]) for folder in (one, all_of_them)}
        seconds = in_turns(listings, rounds)
    alone, together = figure(seconds["one"]), figure(seconds["many"])
    return [
        Row(
            f"dalsegno checkpoints list, {many:,} checkpoints",
            duration(together),
            f"a single one: {duration(alone)}",
            f"{together / alone:.2f} ×",
            f"≤ {duration(LIMIT)}",
            together <= LIMIT,
            together.spread,
        )
    ]


def _copy(source: Path, target: Path, step: int) -> None:
    shutil.copytree(source, target)
    (target / "manifest.json").write_bytes(replace(Manifest.read(source), step=step).to_bytes())
