"""Make the checkpoints that the tests resume: ``python tests/golden/make.py``.

Writes ``checkpoints/format-N/<name>`` beside this file: the newest checkpoint of a run, its logs and ``run.json``; and
``expected.json``, what a resumed run says of itself at its end. Until the first release, make them anew after a change
of the format; what a released version wrote is never overwritten.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from dalsegno.checkpoint.manifest import FORMAT  # noqa: E402
from dalsegno.testing import run_ranks  # noqa: E402
from golden import run  # noqa: E402

RUNS = {"alone": ("none", 1), "sharded": ("fsdp", 2)}
"""``parallel`` and the number of ranks."""


def make(parallel: str, world_size: int, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        output_dir = Path(temporary) / "run"
        run_ranks(run.first_legs, world_size, output_dir, parallel)
        keep(output_dir, run.SAVED, target)
        expected = run_ranks(run.last_leg, world_size, output_dir, parallel)
        logs = {path.name: path.read_text().splitlines() for path in sorted((output_dir / "logs").glob("*.json*"))}
    content = {"parallel": parallel, "world_size": world_size, "ranks": expected, "logs": logs}
    (target / "expected.json").write_text(json.dumps(content) + "\n")


def keep(output_dir: Path, step: int, target: Path) -> None:
    """Copy the checkpoint of ``step``, the logs and ``run.json``."""
    checkpoint = f"checkpoints/step-{step:08d}"
    shutil.copytree(output_dir / checkpoint, target / checkpoint)
    shutil.copytree(output_dir / "logs", target / "logs")
    record = json.loads((output_dir / "run.json").read_text())
    for leg in record["legs"]:
        leg["host"] = "golden"
    (target / "run.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    for name, (parallel, world_size) in RUNS.items():
        make(parallel, world_size, HERE / f"checkpoints/format-{FORMAT}" / name)
