"""What is kept of a run: one checkpoint, its logs and ``run.json``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def keep(output_dir: Path, step: int, target: Path) -> None:
    checkpoint = f"checkpoints/step-{step:08d}"
    shutil.copytree(output_dir / checkpoint, target / checkpoint)
    shutil.copytree(output_dir / "logs", target / "logs")
    record = json.loads((output_dir / "run.json").read_text())
    for leg in record["legs"]:
        leg["host"] = "golden"
    (target / "run.json").write_text(json.dumps(record, indent=2) + "\n")
