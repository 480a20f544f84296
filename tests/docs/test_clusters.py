"""What the page about clusters shows: a manifest that is one, and a program that runs under Ray as it stands there."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dalsegno.logs import RunFile
from dalsegno.system.exit_status import ExitStatus
from dalsegno.testing import compare_runs

PAGE = Path(__file__).parents[2] / "docs/guides/launch.md"
HAS_RAY = importlib.util.find_spec("ray") is not None


def block(language: str, containing: str) -> str:
    """The first block of code in that language that contains the text."""
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return next(each for each in blocks if containing in each)


def test_the_job_for_kubernetes_goes_by_the_exit_status() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(block("yaml", "kind: Job"))
    rules = job["spec"]["podFailurePolicy"]["rules"]
    by_status = {status: rule["action"] for rule in rules for status in rule.get("onExitCodes", {}).get("values", [])}
    assert by_status == {
        ExitStatus.RUN_AGAIN: "Ignore",
        ExitStatus.WRONG_USE: "FailJob",
        ExitStatus.DIVERGED: "FailJob",
    }
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    names = {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule}
    assert names == {container["name"] for container in pod["containers"]}


DRIVER = """
import sys
import ray
import train_ray

ray.init(num_cpus=4, include_dashboard=False)
for output_dir in sys.argv[1:]:
    train_ray.main(output_dir)
"""


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
def test_a_worker_of_ray_is_killed(tmp_path: Path) -> None:
    """The run in two legs equals one that was left alone."""
    (tmp_path / "train_ray.py").write_text(block("python", "TorchTrainer"))
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(parts), str(whole)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
    )
    try:
        while not (parts / "checkpoints/step-00000100").exists():
            assert driver.poll() is None
            time.sleep(0.05)
        os.kill(RunFile(parts).load().legs[-1].pid, signal.SIGKILL)
        assert driver.wait() == 0
    finally:
        driver.kill()
    first, second = RunFile(parts).load().legs
    assert (first.reason, second.reason, second.world_size) == ("died", "finished", 2)
    assert 100 <= second.first_step < second.last_step == 600
    comparison = compare_runs(whole, parts)
    assert comparison.identical, f"\n{comparison.table()}"
