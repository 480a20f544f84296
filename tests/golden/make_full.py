"""Make the checkpoints of ``full_run.py``: ``python tests/golden/make_full.py``, under the package that is to be kept.

They were made by the package as it was before its modules moved into rooms, with ``PYTHONPATH`` set to that source.
Writes ``checkpoints/every-callback/<name>`` beside this file: the checkpoint, its logs, ``run.json``; and
``expected.json``, what the run has come to at its end. What is there is never overwritten.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from dalsegno.testing import run_ranks  # noqa: E402
from golden import full_run  # noqa: E402
from golden.keep import keep, make_missing  # noqa: E402


def make(parallel: str, world_size: int, target: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        output_dir = Path(temporary) / "run"
        run_ranks(full_run.first_leg, world_size, output_dir, parallel)
        keep(output_dir, full_run.SAVED, target)
        run_ranks(full_run.last_leg, world_size, output_dir, parallel)
        made = {"parallel": parallel, "world_size": world_size, "libraries": full_run.LIBRARIES}
        content = {**made, **full_run.contents(output_dir)}
    (target / "expected.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    make_missing(HERE / "checkpoints/every-callback", make)
