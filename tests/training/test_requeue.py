"""``requeue=True``: a job that Slurm stops in time is requeued, and its run ends as if it had never been stopped."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.logs import RunFile
from dalsegno.system.slurm import SlurmJob
from dalsegno.testing import compare_runs, run_ranks
from dalsegno.training import stop_requests
from support import slurm_job
from support.listeners import Listener
from support.own_loops import OwnLoop
from support.slurm import MISSING, Cluster, private_cluster
from support.small import small_trainer

HERE = Path(__file__).parents[1]
JOB = HERE / "support/slurm_job.py"

needs_slurm = pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: there is no {', '.join(MISSING)}")


# --- Slurm itself -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running_cluster() -> Iterator[Cluster]:
    with private_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """It is the one that this process and its jobs ask."""
    monkeypatch.setenv("SLURM_CONF", str(running_cluster.configuration))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    return running_cluster


def assert_as_whole(parts: Path, train: Callable[[Path], None]) -> None:
    """The run in two legs equals one outside of Slurm."""
    whole = parts.with_name("whole")
    run_ranks(train, 1, whole)
    comparison = compare_runs(whole, parts)
    assert comparison.identical, f"\n{comparison.table()}"


def ends(output_dir: Path) -> list[tuple[str | None, str | None, int]]:
    return [(leg.reason, leg.by, leg.last_step) for leg in RunFile(output_dir).load().legs]


@needs_slurm
def test_a_preempted_job_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm itself does not requeue a job that ends within its grace period."""
    run = tmp_path / "run"
    job = cluster.submit(f"srun {sys.executable} {JOB} {run} signal", "--partition=patient")
    cluster.until(job, (run / slurm_job.WAITS).exists)
    cluster.until_completed(cluster.submit("true", "--partition=urgent"))
    cluster.until_completed(job)
    assert cluster.field(job, "Restarts") == "1"
    assert f"Slurm job {job} is requeued: the run resumes at step 4" in cluster.output_of(job)
    assert ends(run) == [("stopped", "signal", 4), ("finished", None, 12)]
    assert_as_whole(run, slurm_job.train)


@needs_slurm
def test_a_job_whose_time_is_over_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = cluster.submit(f"unset SLURM_JOB_END_TIME; srun {sys.executable} {JOB} {run} end", "--time=10")
    cluster.until_completed(job)
    assert cluster.field(job, "Restarts") == "1"
    first, second = ends(run)
    assert (first[:2], second) == (("stopped", "clock"), ("finished", None, 12))
    assert_as_whole(run, slurm_job.train_in_own_loop)


@needs_slurm
def test_a_task_of_an_array_is_requeued_alone(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SLURM_JOB_ID of the last task is the id of the whole array."""
    array = cluster.submit("env; sleep 100", "--array=0-1")
    for task in ("0", "1"):
        cluster.until(f"{array}_{task}", lambda task=task: cluster.field(f"{array}_{task}", "JobState") == "RUNNING")  # type: ignore[misc]
    last = {"SLURM_JOB_ID": array, "SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": "1"}
    job = SlurmJob.current(last)
    assert job is not None and job.status().is_running
    job.requeue()
    assert not job.status().is_running
    assert (cluster.field(f"{array}_0", "JobState"), cluster.field(f"{array}_0", "Restarts")) == ("RUNNING", "0")
    cluster.call("scancel", array)


@needs_slurm
def test_a_cancelled_job_does_not_run(cluster: Cluster) -> None:
    """As long as its processes take to end, scontrol would requeue it."""
    job = cluster.submit("trap '' TERM; echo ready; sleep 3 & wait; wait", "--no-requeue", "--time=10")
    cluster.until(job, lambda: "ready" in cluster.output_of(job))
    running = SlurmJob(job).status()
    assert (running.is_running, running.is_batch, running.allows_requeue) == (True, True, False)
    assert running.end is not None and 500 < running.end - time.time() <= 600
    cluster.call("scancel", job)
    assert not SlurmJob(job).status().is_running


# --- when a job is requeued -------------------------------------------------------------------------------------------


SCONTROL = """#!/bin/sh
echo "$@" >> {folder}/requests
case "$1" in
  requeue) cp {folder}/run/run.json {folder}/seen.json; {requeue} ;;
  show) echo "JobId=17 JobName=a JobState=x"; echo "   JobState={state} Requeue={requeues} BatchFlag=1 EndTime={end}" ;;
esac
"""


class Scontrol:
    """Stands in for Slurm's program, in a folder that comes first in PATH."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def answer(self, state: str = "RUNNING", requeue: str = "true", requeues: int = 1, end: str = "Unknown") -> None:
        script = self._folder / "scontrol"
        values = {"state": state, "requeue": requeue, "requeues": requeues, "end": end}
        script.write_text(SCONTROL.format(folder=self._folder, **values))
        script.chmod(0o755)

    @property
    def requests(self) -> list[str]:
        path = self._folder / "requests"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def requeued(self) -> int:
        return self.requests.count("requeue 17")


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scontrol:
    """This process is in job 17, whose end Slurm announces."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 10_000))
    fake = Scontrol(tmp_path)
    fake.answer()
    return fake


def at_step(step: int, act: Callable[[Any], object]) -> ds.Callback:
    return Listener({"on_step_end": lambda ctx: act(ctx) and None if ctx.step == step else None}, name="actor")


def terminate(ctx: Any) -> None:
    signal.raise_signal(signal.SIGTERM)


def test_after_a_signal_all_is_recorded_before_the_job_is_requeued(tmp_path: Path, scontrol: Scontrol) -> None:
    result = small_trainer(tmp_path / "run", at_step(3, terminate), max_steps=6, save_steps=100, requeue=True).train()
    assert (result.reason, result.checkpoint) == ("stopped", tmp_path / "run/checkpoints/step-00000003")
    assert scontrol.requests == ["show job 17", "show job 17", "requeue 17"], "before the first step, and at the end"
    assert (tmp_path / "seen.json").read_text() == (tmp_path / "run/run.json").read_text()
    assert ends(tmp_path / "run") == [("stopped", "signal", 3)]
    assert small_trainer(tmp_path / "run", max_steps=6, requeue=True).train().reason == "finished"
    assert scontrol.requeued == 1, "a finished run is not"


def test_one_of_several_ranks_requeues_the_job(tmp_path: Path, scontrol: Scontrol) -> None:
    """Rank 0, whichever has received the signal."""
    run_ranks(slurm_job.train_and_terminate, 2, tmp_path / "run", 1)
    assert ends(tmp_path / "run")[0][:2] == ("stopped", "signal")
    assert scontrol.requests == ["show job 17", "show job 17", "requeue 17"]


def test_after_a_clock_in_a_loop_of_its_own(tmp_path: Path, scontrol: Scontrol) -> None:
    result = OwnLoop(tmp_path / "run", Listener({}), requeue=True, max_seconds=1e-9).train()
    assert result is not None and (result.reason, result.stopped_by) == ("stopped", "clock")
    assert scontrol.requeued == 1


@pytest.mark.parametrize("final", [False, True])
def test_a_run_that_the_program_or_a_callback_stops_is_not_requeued(
    tmp_path: Path, scontrol: Scontrol, final: bool
) -> None:
    stop = at_step(3, lambda ctx: ctx.control.stop("enough", final=True) if final else ctx.trainer.stop("enough"))
    assert small_trainer(tmp_path / "run", stop, max_steps=6, requeue=True).train().why == "enough"
    assert scontrol.requeued == 0


def test_neither_is_one_that_fails(tmp_path: Path, scontrol: Scontrol) -> None:
    def fail(ctx: Any) -> None:
        terminate(ctx)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        small_trainer(tmp_path / "run", at_step(3, fail), max_steps=6, requeue=True).train()
    assert scontrol.requeued == 0


def test_neither_is_a_job_that_slurm_ends(tmp_path: Path, scontrol: Scontrol, caplog: pytest.LogCaptureFixture) -> None:
    """It was cancelled, or Slurm has requeued it: a second time, scontrol would fail, or undo what the user did."""

    def end_the_job(ctx: Any) -> None:
        scontrol.answer("COMPLETING")
        terminate(ctx)

    result = small_trainer(tmp_path / "run", at_step(3, end_the_job), max_steps=6, requeue=True).train()
    assert (result.reason, scontrol.requeued) == ("stopped", 0)
    assert "job 17 is not requeued from here: its state is COMPLETING" in caplog.text


def test_without_requeue_nothing_is_asked(tmp_path: Path, scontrol: Scontrol) -> None:
    small_trainer(tmp_path / "run", at_step(3, terminate), max_steps=6).train()
    assert scontrol.requests == []


def test_outside_of_slurm_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = small_trainer(tmp_path, at_step(3, terminate), max_steps=6, requeue=True)
    assert [trainer.train().reason, trainer.train().reason] == ["stopped", "finished"]
    assert caplog.text.count("requeue=True has no effect: this process is not part of a Slurm job") == 1


def test_what_scontrol_says_when_it_fails(tmp_path: Path, scontrol: Scontrol, caplog: pytest.LogCaptureFixture) -> None:
    scontrol.answer(requeue="echo 'Requested operation is presently disabled for job 17' >&2; exit 1")
    result = small_trainer(tmp_path / "run", at_step(3, terminate), max_steps=6, requeue=True).train()
    assert (result.reason, result.stopped_by) == ("stopped", "signal"), "the leg's result stands"
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert message == (
        "Slurm job 17 is not requeued: scontrol requeue 17 failed with status 1: Requested operation is presently "
        "disabled for job 17; submit it again, and the run resumes"
    )


def test_a_job_that_cannot_be_requeued_is_said_before_the_first_step(
    tmp_path: Path, scontrol: Scontrol, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol.answer(requeues=0)
    look = at_step(1, lambda ctx: seen.append(caplog.text))
    seen: list[str] = []
    small_trainer(tmp_path / "run", look, max_steps=1, requeue=True).train()
    assert "requeue=True: Slurm job 17 cannot be requeued: submit it with sbatch --requeue" in seen[0]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    small_trainer(tmp_path / "other", look, max_steps=1, requeue=True).train()
    assert "scontrol show job 17 could not be run: " in seen[1]


def test_the_end_of_the_job_where_slurm_does_not_announce_it(
    tmp_path: Path, scontrol: Scontrol, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    clock = SimpleNamespace(monotonic=itertools.count(1000).__next__, time=lambda: 1_800_000_000.0)
    monkeypatch.setattr(stop_requests, "time", clock)
    scontrol.answer(end="1800000020")
    result = small_trainer(tmp_path / "run", max_steps=1_000_000).train()
    assert result.stopped_by == "clock"
    assert result.why is not None and result.why.startswith("Slurm ends this job in ")
    scontrol.answer(end="Unknown")
    assert small_trainer(tmp_path / "unlimited", max_steps=4).train().reason == "finished"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert small_trainer(tmp_path / "unknown", max_steps=4).train().reason == "finished"
    assert "the end of Slurm job 17 is not known: scontrol show job 17 could not be run" in caplog.text
