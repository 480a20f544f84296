"""Makes the picture of docs/guides/control.md: ``python docs/images/control.py``. Needs Chromium, as plots.py.

Two small transformers learn the source of Python's standard library while the live page follows them. One is killed and
started again, its learning rate is halved, and a checkpoint is saved from the page.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import dalsegno as ds
import plots
from dalsegno.callbacks import TrainerControlCallback
from dalsegno.control.client import JobClient, resolve
from dalsegno.testing import FaultPlan, start_ranks

sys.path.insert(0, str(plots.CHROMIUM))
from support.chromium import Chromium

STEPS = 1600


def train(folder: Path, rate: float, kill_at: int | None = None) -> None:
    plan = None if kill_at is None else FaultPlan(event=ds.Event.STEP_END, count=kill_at)
    plots.train(folder, rate, plan, steps=STEPS, callbacks=[TrainerControlCallback(job_id=folder.name)])


def pictured(browser: Chromium, folder: Path) -> None:
    """Let the page see a kill, a restart and two commands."""
    card = "document.querySelector('.card')"
    step = f"Number(/step ([\\d,]+)/.exec({card}.innerText)[1].replaceAll(',', ''))"
    first = start_ranks(train, 1, folder / "baseline", 3e-3, 640)
    browser.wait(f"{step} > 100", 300)
    second = start_ranks(train, 1, folder / "ten-times-the-rate", 3e-2)
    first.wait(600)
    first = start_ranks(train, 1, folder / "baseline", 3e-3)
    browser.wait(f"{card}.innerText.includes('running') && {step} > 700 && {step} < 1000", 300)
    with JobClient.of(resolve(str(folder / "baseline"))) as client:
        client.send("set", {"learning_rate": {"factor": 0.5}}, wait=60)
    browser.wait(f"{step} > 800", 300)
    browser.run("document.querySelector('[data-command=save_checkpoint]').click()")
    browser.run("document.getElementById('yes').click()")
    browser.wait(f"{step} > 900 && {card}.innerText.includes('took effect')", 300)
    box = "document.querySelector('figure svg').getBoundingClientRect()"
    where = [f"{box}.left + {box}.width * 0.4", f"{box}.top + {box}.height * 0.55"]
    browser.mouse("mouseMoved", *(browser.run(each) for each in where))
    plots.keep(browser.picture(whole=False), "control")
    for job in (first, second):
        job.kill()
        job.wait(60)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="runs-") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        command = [sys.executable, "-m", "dalsegno", "jobs", "open", "--print"]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as page,
            Chromium(Path(folder) / "profile") as browser,
        ):
            assert page.stdout is not None
            browser.open(page.stdout.readline().strip())
            browser.look(1100, 1060)
            pictured(browser, Path(folder))
            page.send_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
