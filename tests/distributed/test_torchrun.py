"""Under torchrun itself, as on a real machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.callbacks import JsonLogger
from dalsegno.checkpoint import CheckpointManager
from dalsegno.logs import RunFile, read_records
from support.models import Line
from support.small import small_trainer
from support.torchrun_job import RESUMES_FROM
from support.warm import Program

HERE = Path(__file__).parents[1]
TORCHRUN = Path(sys.executable).with_name("torchrun")
COMMAND = [TORCHRUN, "--standalone", "--nproc-per-node=2"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job whose one restart is needed where one rank of two is killed; it is stopped by SIGTERM."""
    folder = tmp_path_factory.mktemp("job")
    command = [*COMMAND, "--max-restarts=1", "--monitor-interval=0.1", HERE / "support/torchrun_job.py", folder]
    with (folder / "errors").open("w") as errors:
        started = Program(command, env=environment(), stdout=subprocess.PIPE, stderr=errors)
    with started:
        assert started.stdout is not None
        try:
            assert started.stdout.readline() == f"saved step {RESUMES_FROM + 2}\n", (folder / "errors").read_text()
        finally:
            started.send_signal(signal.SIGTERM)
    return folder


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }


def test_two_ranks_by_themselves(job: Path, tmp_path: Path) -> None:
    """``parallel="auto"`` finds the ranks; the same losses as alone; the second leg continues from the first.

    Both ranks have come to its end without an error, which would have taken the job's restart.
    """
    settings = {"lr_scheduler_type": "constant", "logging_steps": 1, "max_steps": 6}
    small_trainer(tmp_path / "one", JsonLogger(), model=Line(), **settings).train()
    alone = [record["loss"] for record in read_records(tmp_path / "one/logs/train.jsonl") if "loss" in record]
    result = json.loads((job / "two/result.json").read_text())
    assert result == {"world_size": 2, "losses": pytest.approx(alone, rel=1e-4)}
    assert [(leg.first_step, leg.last_step, leg.world_size) for leg in RunFile(job / "two").load().legs] == [
        (0, 3, 2),
        (3, 6, 2),
    ]


def test_max_restarts_resumes_from_the_newest_checkpoint_and_sigterm_stops_in_time(job: Path) -> None:
    """One rank of two is killed; torchrun ends the other, starts both again, and they resume; it stops in time."""
    legs = RunFile(job / "run").load().legs
    assert [leg.first_step for leg in legs] == [0, RESUMES_FROM]
    assert (legs[-1].reason, legs[-1].by) == ("stopped", "signal")
    newest = CheckpointManager(job / "run").find()
    assert newest is not None
    assert newest.step == legs[-1].last_step > RESUMES_FROM
    steps = [record["global_step"] for record in read_records(job / "run/logs/train.jsonl") if "loss" in record]
    assert steps == list(range(1, newest.step + 1))
