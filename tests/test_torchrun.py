"""Under torchrun itself, as on a real machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.callbacks import JsonLogger
from dalsegno.logs import RunFile, read_records
from support.small import Line, small_trainer

HERE = Path(__file__).parent


def test_two_ranks_by_themselves(tmp_path: Path) -> None:
    """``parallel="auto"`` finds the ranks; the same losses as alone; the second leg goes on from the first."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = [str(HERE / "support/torchrun_job.py"), str(tmp_path / "two")]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *job], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

    settings = {"lr_scheduler_type": "constant", "logging_steps": 1, "max_steps": 6}
    small_trainer(tmp_path / "one", JsonLogger(), model=Line(), **settings).train()
    alone = [record["loss"] for record in read_records(tmp_path / "one/logs/train.jsonl") if "loss" in record]
    told = json.loads((tmp_path / "two/told.json").read_text())
    assert told == {"world_size": 2, "losses": pytest.approx(alone, rel=1e-4)}
    assert [(leg.first_step, leg.last_step, leg.world_size) for leg in RunFile(tmp_path / "two").load().legs] == [
        (0, 3, 2),
        (3, 6, 2),
    ]
