"""The live page in a real browser: it follows a real training, commands it, loses it and finds it again."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import dalsegno as ds
from control.talking import ask, wait_until
from dalsegno.callbacks import JsonLogger, TrainerControlCallback
from dalsegno.control.client import sender
from dalsegno.control.jobs import find_job
from dalsegno.testing import start_ranks, tiny_regression_data
from dalsegno.testing.processes import Ranks
from support.chromium import PROGRAM, Chromium
from support.small import small_trainer

HOSTILE = "<img src=x onerror=document.title='owned'>"
TOKEN = "the-token-of-one-test"

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here (Debian's package: chromium)")

CARDS = "[...document.querySelectorAll('.card')]"
STATES = f"{CARDS}.map((card) => card.querySelector('.badge').textContent)"
ANSWER = "document.querySelector('.answer').textContent"
LOSS = "data.charts.find((chart) => chart.metric === 'loss')"
LAST = f"{LOSS}.curves.find((curve) => curve.run === 0 && !curve.cut).steps.at(-1)"
CUT = f"{LOSS}.curves.filter((curve) => curve.cut)"
DIALOG = "document.getElementById('confirm').open"


class HostileMetric(ds.Callback):
    """Logs a value whose name is HTML. Each step takes as long as one of a larger model."""

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        time.sleep(0.005)

    def on_log(self, ctx: ds.LogContext) -> None:
        ctx.logs[HOSTILE] = 1.0


def train(output_dir: Path, control: dict[str, Any]) -> None:
    callbacks = [HostileMetric(), JsonLogger(), TrainerControlCallback(**control)]
    settings = {"max_steps": 1_000_000, "logging_steps": 2, "eval_steps": 100, "save_in_background": False}
    parts = {"eval_dataset": tiny_regression_data(4)}
    small_trainer(output_dir, *callbacks, parts=parts, **settings).train()


class Job:
    """A training in a process of its own, which can be killed and started again."""

    def __init__(self, output_dir: Path, job_id: str, **control: Any) -> None:
        self.output_dir, self.job_id = output_dir, job_id
        self._control = {"job_id": job_id, **control}
        self.start()

    def start(self, **control: Any) -> None:
        self._process: Ranks | None = start_ranks(train, 1, self.output_dir, {**self._control, **control})

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self.end()

    def end(self) -> None:
        if self._process is not None:
            self._process.wait(60)
            self._process = None

    def port(self) -> int:
        """Once its server answers."""

        def published() -> int | None:
            job = find_job(self.job_id)
            return job.endpoint.port if job is not None and job.endpoint is not None else None

        return int(wait_until(published))

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.output_dir / "checkpoints").glob("step-*") if path.suffix == "")


@pytest.fixture(scope="module", autouse=True)
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def job(registry: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    job = Job(tmp_path_factory.mktemp("runs") / HOSTILE, "first")
    yield job
    job.kill()


@pytest.fixture(scope="module")
def hub(registry: None) -> Iterator[subprocess.Popen[str]]:
    """``dalsegno jobs open``, which prints the file that a browser would open."""
    command = [sys.executable, "-m", "dalsegno", "jobs", "open", "--print"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def browser(hub: subprocess.Popen[str], job: Job, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """With the page of the hub, which follows the job."""
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        assert hub.stdout is not None
        browser.open(hub.stdout.readline().strip())
        browser.look(1000, 1200)
        browser.wait(f"{STATES}[0] === 'running'")
        yield browser


def test_a_curve_grows_while_one_looks(browser: Chromium) -> None:
    path = "document.querySelector('figure[data-metric=loss] path[data-run]').getAttribute('d')"
    step, drawn = browser.wait(f"{LAST} > 4 && {path} && [{LAST}, {path}]")
    browser.wait(f"{LAST} > {step + 20} && {path} !== {drawn!r}")
    assert re.search(r"step [\d,]+ of 1,000,000", browser.run(f"{CARDS}[0].innerText"))
    assert "steps/s" in browser.wait(f"/steps.s/.test({CARDS}[0].innerText) && {CARDS}[0].innerText")


def test_the_token_is_in_no_address(browser: Chromium) -> None:
    assert browser.run("location.hash") == ""
    token = browser.run("sessionStorage.getItem(TOKEN)")
    assert len(token) == 64
    sent = [url for url in browser.requests() if url.startswith("http")]
    assert len(sent) > 3
    assert not any(token in url for url in sent)  # the protocol of the browser lists a fragment apart
    assert {urlsplit(url).netloc for url in sent} == {browser.run("location.host")}


def test_a_button_saves_once_it_is_confirmed(browser: Chromium, job: Job) -> None:
    before = job.checkpoints()
    save = f"{CARDS}[0].querySelector('[data-command=save_checkpoint]')"
    browser.run(f"{save}.focus()")
    browser.press("Enter", 13)
    browser.wait(DIALOG)
    assert browser.run("document.activeElement.textContent") == "Cancel"
    browser.press("Escape", 27)
    browser.wait(f"!{DIALOG}")
    assert browser.run("document.activeElement.textContent") == "Save"
    browser.run(f"{save}.click()")
    browser.run("document.getElementById('yes').click()")
    answer = browser.wait(f"{ANSWER}.includes('took effect') && {ANSWER}")
    step = int(re.sub(r"\D", "", answer))
    wait_until(lambda: job.checkpoints() == [*before, f"step-{step:08d}"])
    for kind in ("checkpoint", "command"):
        browser.wait(f"document.querySelector('figure[data-metric=loss] .mark.{kind}') !== null")
    row = browser.wait("document.querySelector('#commands tbody tr')?.innerText")
    assert "save_checkpoint" in row and f"step {step:,}" in row


def test_the_learning_rate_is_set_by_value_and_by_factor(browser: Chromium, job: Job) -> None:
    def set_to(text: str) -> Any:
        browser.run(
            f"document.querySelector('.answer').textContent = ''; {CARDS}[0].querySelector('input').value = {text!r}"
        )
        browser.run(f"{CARDS}[0].querySelector('[data-command=set]').click()")
        if browser.run(DIALOG):
            browser.run("document.getElementById('yes').click()")
            assert browser.wait(f"{ANSWER}.includes('took effect') && {ANSWER}").startswith("Learning rate:")
            line = json.loads((job.output_dir / "control.jsonl").read_text().splitlines()[-2])
            return line["by"], line["data"]
        return None

    sent = sender(), {"learning_rate": 0.003}
    assert set_to("3e-3") == sent
    log = ds.open_log(job.output_dir)
    wait_until(lambda: [*log.records()][-1].get("learning_rate") == pytest.approx(0.003, rel=0.01))
    assert set_to("x0.5") == (sender(), {"learning_rate": {"factor": 0.5}})
    assert set_to("soon") is None
    assert sender() in browser.wait("document.querySelector('#commands tbody tr')?.innerText")


def test_names_are_only_text(browser: Chromium) -> None:
    browser.wait(f"data.charts.some((chart) => chart.metric === {HOSTILE!r})")
    assert browser.run(f"{CARDS}[0].querySelector('h2').textContent") == HOSTILE
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert "owned" not in browser.run("document.title").replace(HOSTILE, "")


def test_numbers_are_short(browser: Chromium) -> None:
    assert browser.run("[5461.12, 12821.4, 1234567, 0.1234567].map(format)") == [
        "5,461.1",
        "12,821",
        "1,234,567",
        "0.12346",
    ]
    assert browser.run("fact('peak memory (bytes)', 2 ** 29)") == ["peak memory", "0.50 GiB"]


def test_on_a_phone_and_in_the_dark(browser: Chromium) -> None:
    browser.look(390, 844, phone=True, dark=True)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 31)"
    browser.run(f"{CARDS}[0].querySelector('[data-command=abort]').click()")
    assert browser.run("document.documentElement.scrollWidth") <= 390
    browser.press("Escape", 27)
    browser.look(1000, 1200)
    assert browser.run("document.documentElement.scrollWidth") <= 1000


def test_nothing_was_refused_or_broken(browser: Chromium) -> None:
    """So far: a server that is gone is an error on the console."""
    assert browser.complaints(browser.run("location.origin")) == []


def test_two_jobs_side_by_side(browser: Chromium, tmp_path: Path) -> None:
    other = Job(tmp_path / "other", "other")
    try:
        browser.wait(f"{STATES}.length === 2 && {STATES}.every((state) => state === 'running')")
        browser.wait(f"[0, 1].every((run) => {LOSS}.curves.some((curve) => curve.run === run && curve.steps.length))")
        other_card = f"{CARDS}.find((card) => card.querySelector('h2').textContent === 'other')"
        browser.run(f"{other_card}.querySelector('[data-command=graceful_stop]').click()")
        browser.run("document.getElementById('yes').click()")
        other.end()
        browser.wait(f"{other_card}.querySelector('.badge').textContent.startsWith('ended: stopped')")
        assert other.checkpoints() != []
        assert browser.run(f"{other_card}.querySelector('.answer').className") != "answer bad"
        browser.run(f"{other_card}.querySelector('.close').click()")
        assert browser.run(f"{CARDS}.length") == 1
    finally:
        other.kill()


def test_a_killed_run_is_found_again_and_goes_back_to_its_checkpoint(browser: Chromium, job: Job) -> None:
    (checkpoint,) = job.checkpoints()
    saved = int(checkpoint[5:])
    browser.run("window.isTheSamePage = true")
    reached = browser.wait(f"{LAST} > {saved + 60} && {LAST}")
    job.kill()
    browser.wait(f"['killed', 'no answer'].includes({STATES}[0])")
    assert browser.run(f"{CARDS}[0].querySelector('[data-command=evaluate]').disabled")
    job.start()
    browser.wait(f"{STATES}[0] === 'running'")
    browser.wait(f"{CUT}.length && {CUT}[0].steps[0] > {saved}")
    assert browser.run(f"{CUT}[0].steps.at(-1)") >= reached
    browser.wait(f"{LAST} > {saved} && document.querySelector('figure[data-metric=loss] .mark.leg') !== null")
    (label,) = browser.run("data.runs[0].marks.filter((mark) => mark.kind === 'leg').map((mark) => mark.label)")
    assert label.startswith(f"leg 2: resumed from step {saved:,}")
    steps = browser.run(f"{LOSS}.curves.find((curve) => curve.run === 0 && !curve.cut).steps")
    assert steps == sorted(set(steps)), "no record is there twice"
    assert browser.run("window.isTheSamePage")


def test_a_jobs_own_server_wants_its_token(tmp_path: Path) -> None:
    """And its page connects again to a restarted job, if the job keeps its port and token."""
    job = Job(tmp_path / "own", "own", auth_token=TOKEN)
    try:
        address = f"http://127.0.0.1:{job.port()}/"
        policy = ask(job.port(), "GET", "/").headers["content-security-policy"]
        assert "unsafe" not in policy and "default-src 'none'" in policy
        with Chromium(tmp_path / "profile") as browser:
            browser.open(f"{address}#token=wrong")
            browser.wait("document.getElementById('said').textContent === 'The token was refused.'")
            assert browser.run(f"{CARDS}.length") == 0
            assert browser.run("location.href") == address
            browser.run(f"document.getElementById('token-field').value = {TOKEN!r}")
            browser.run("document.querySelector('#token button').click()")
            browser.wait(f"{STATES}[0] === 'running' && {LAST} > 2")
            assert browser.run("document.getElementById('token').hidden")
            job.kill()
            browser.wait("document.getElementById('said').textContent.startsWith('The server does not answer.')")
            job.start(port=int(address.split(":")[2].strip("/")))
            browser.wait(f"{STATES}[0] === 'running' && document.getElementById('said').textContent === ''")
    finally:
        job.kill()


def test_a_long_curve_is_thinned_and_keeps_its_spikes(browser: Chromium) -> None:
    script = """(() => {
        const curve = new GrowingCurve(0, "x"), odd = { 54321: 77, 60000: null };
        for (let step = 1; step <= 100000; step++) curve.add(step, step in odd ? odd[step] : 2 + (step % 7) / 10);
        const where = (value) => curve.steps[curve.values.indexOf(value)];
        const means = curve.means.filter((mean) => mean < 3).length;
        return [curve.values.length, Math.max(...curve.values), where(77), where(null), curve.steps.at(-1), means];
    })()"""
    points, highest, spike, gap, last, means = browser.run(script)
    assert 3000 < points <= 12_000
    assert (highest, spike, gap) == (77, 54_321, 60_000)
    assert 99_900 < last <= 100_000
    assert 1000 < means <= 12_000


def test_a_number_beyond_floats_is_a_gap(browser: Chromium) -> None:
    """As NaN is: the browser reads 1e999, which the log of another program may have, as infinity."""
    assert browser.run("JSON.parse('[1e999, -1e999, 0.5]').map(number)") == [None, None, 0.5]
