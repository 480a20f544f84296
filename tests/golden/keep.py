"""What is kept of a run: one checkpoint, its logs and ``run.json``; and which runs are made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

RUNS = {"alone": ("none", 1), "sharded": ("fsdp", 2)}
"""How the model is spread, and over how many ranks."""


def make_missing(folder: Path, make: Callable[[str, int, Path], None]) -> None:
    """Call ``make(parallel, world_size, target)`` for each run that is not in the folder yet."""
    for name, (parallel, world_size) in RUNS.items():
        target = folder / name
        if not target.exists():
            make(parallel, world_size, target)
            print(target)


def keep(output_dir: Path, step: int, target: Path) -> None:
    checkpoint = f"checkpoints/step-{step:08d}"
    shutil.copytree(output_dir / checkpoint, target / checkpoint)
    shutil.copytree(output_dir / "logs", target / "logs")
    record = json.loads((output_dir / "run.json").read_text())
    for leg in record["legs"]:
        leg["host"] = "golden"
    (target / "run.json").write_text(json.dumps(record, indent=2) + "\n")
