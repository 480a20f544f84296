"""Make the checkpoints that are kept for ever: ``python tests/golden/make.py``, once for each version of the format.

Writes ``checkpoints/format-N/<name>`` beside this file: the newest checkpoint of a run, its logs and ``run.json``; and
``expected.json``, what a resumed run says of itself at its end. What is there is never overwritten.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from dalsegno.checkpoint.format.manifest import FORMAT  # noqa: E402
from dalsegno.testing import run_ranks  # noqa: E402
from golden import run  # noqa: E402
from golden.keep import keep, make_missing  # noqa: E402


def make(parallel: str, world_size: int, target: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        output_dir = Path(temporary) / "run"
        run_ranks(run.first_legs, world_size, output_dir, parallel)
        keep(output_dir, run.SAVED, target)
        expected = run_ranks(run.last_leg, world_size, output_dir, parallel)
        logs = {path.name: path.read_text().splitlines() for path in sorted((output_dir / "logs").glob("*.json*"))}
    content = {"parallel": parallel, "world_size": world_size, "ranks": expected, "logs": logs}
    (target / "expected.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    make_missing(HERE / f"checkpoints/format-{FORMAT}", make)
