"""A report: one file, small, without a network, and with everything in it only text."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dalsegno.analysis import ParameterSeries, open_log, open_logs, write_report
from dalsegno.analysis.report.payload import payload
from dalsegno.callbacks import JsonLogger
from dalsegno.errors import ConfigurationError
from dalsegno.logs import PreviousLeg
from support.commanded import Client
from support.listeners import Listener
from support.small import small_trainer

GOLDEN = Path(__file__).parents[2] / "golden" / "logs"
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """A report, taken apart as a browser would."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        in_script = bool(self.elements) and self.elements[-1][0] == "script" and bool(data.strip())
        (self.scripts if in_script else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found


def a_run(folder: Path, records: list[dict[str, Any]]) -> Path:
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def loss(step: int, value: Any, **more: Any) -> dict[str, Any]:
    return {"timestamp": 1.7e9 + step, "global_step": step, "epoch": step / 100, "loss": value, **more}


def test_real_runs(tmp_path: Path) -> None:
    page = Page(write_report(open_logs([GOLDEN]), tmp_path / "report.html"))
    assert "4 runs" in page.text
    for part in (
        "Summary run state steps",
        "diverged 10 8.1872e+10",
        "Restarts and ends diverged leg began (UTC) from resumed steps",
        "loss diverged at step 10",
        "killed leg began (UTC) from resumed steps",
        "diverged loss unknown nothing to judge: 5 records, all within the warm-up",
        "Dashed vertical lines are restarts, dotted ones rollbacks",
        "The first 8 are shown; dalsegno logs heatmap RUN draws the others.",
        "2 2026-11-21 04:59 leg 1, step 16 16 – 34 2 1 died",
        "Compared with diverged",
        "DivergenceDetector replayed with smoothing 0.3, patience 3, warm-up 10.",
        "killed: gradient norm of each parameter",
        "killed: weight norm of each parameter",
        '"run": "pair-a", "rate": 0.05',
    ):
        assert part in page.text, part
    assert page.data["axes"]["time"] == "seconds since the first record"
    assert page.data["runs"][0]["axes"]["time"]["places"][0] == 0
    assert 0 < page.data["runs"][0]["axes"]["time"]["places"][-1] < 120
    assert len(page.data["heatmaps"]) == 8
    charts = {chart["metric"]: chart for chart in page.data["charts"]}
    assert list(charts)[:3] == ["loss", "grad_norm", "learning_rate"]
    assert {curve["metric"] for curve in charts["loss"]["curves"]} == {"loss", "eval_loss"}
    assert [mark["label"] for mark in page.data["runs"][1]["marks"]] == [
        "leg 2: resumed from step 16, 6 steps repeated",
        "leg 3: resumed from step 32, 2 steps repeated",
        "leg 4: resumed from step 16, 24 steps repeated",
    ]


def test_what_the_user_changed_and_why_a_leg_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drop of the rate has its explanation, at its step, on the page."""

    def train(*callbacks: Any, rate: float) -> None:
        settings: dict[str, Any] = {"max_steps": 12, "save_steps": 5, "learning_rate": rate, "logging_steps": 1}
        small_trainer(tmp_path / "a", JsonLogger(), *callbacks, **settings).train()

    def break_off(ctx: Any) -> None:
        if ctx.state.global_step == 7:
            raise RuntimeError("the disk is gone")

    commands = Client({3: [("set", {"learning_rate": {"factor": 0.5}})], 4: [("log", {})], 9: [("evaluate", {})]})
    with pytest.raises(RuntimeError):
        train(commands, Listener({"on_step_begin": break_off}), rate=1e-2)
    ended = PreviousLeg(os.uname().nodename, os.getpid(), "rank 1 was killed by SIGKILL")
    for name, value in ended.to_environment().items():
        monkeypatch.setenv(name, value)
    train(rate=2e-2)
    (log,) = open_log(tmp_path / "a")
    page = Page(write_report([log], tmp_path / "report.html"))
    changed = "learning_rate: saved 0.01, now 0.02 (the schedule continues from its position, at the new rate)"
    for part in (
        "RuntimeError: the disk is gone, rank 1 was killed by SIGKILL",
        "Settings and commands run step when (UTC) what by",
        "set learning_rate=×0.5 client at 3",
        f"{changed} leg 2",
    ):
        assert part in page.text, part
    marks = page.data["runs"][0]["marks"]
    assert [(mark["step"], mark["kind"], mark["label"]) for mark in marks] == [
        (5, "leg", "leg 2: resumed from step 5, 2 steps repeated (rank 1 was killed by SIGKILL)"),
        (3, "command", "set learning_rate=×0.5 (client at 3), at step 3"),
        (4, "command", "log (client at 4), at step 4"),
        (5, "command", f"{changed} (leg 2), at step 5"),
    ]


def test_nothing_is_asked_of_a_network_and_only_its_own_script_may_run(tmp_path: Path) -> None:
    page = Page(write_report(open_logs([GOLDEN]), tmp_path / "report.html"))
    policy = next(attributes for tag, attributes in page.elements if "http-equiv" in attributes)["content"] or ""
    script = page.scripts[1]
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert "default-src 'none'" in policy
    for _, attributes in page.elements:
        assert not {"src", "href", "onclick", "onload"} & attributes.keys()
    addresses = set(re.findall(r"https?://[^\s\"')]+", page.html))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a namespace, which nobody fetches"


def test_names_from_logs_are_only_text(tmp_path: Path) -> None:
    records = [{"kind": "header", "run": HOSTILE, "note": "\u2028"}, *(loss(step, 1.0) for step in range(1, 30))]
    records[5][HOSTILE] = 3.0
    records[6][HOSTILE] = 4.0
    (log,) = open_log(a_run(tmp_path / "a", records))
    log.name = HOSTILE
    page = Page(write_report([log], tmp_path / "report.html", title=f"A {HOSTILE}"))
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert "img" not in {tag for tag, _ in page.elements}
    assert page.html.count("</script>") == 2
    assert HOSTILE in page.text
    assert page.data["runs"][0]["name"] == HOSTILE
    assert HOSTILE in [chart["metric"] for chart in page.data["charts"]]
    assert HOSTILE in unescape(page.html)


def test_a_long_log_makes_a_small_file_and_keeps_its_spikes(tmp_path: Path) -> None:
    values = 2 + np.random.default_rng(0).normal(size=100_000) / 10
    values[54_321] = 77.0
    noisy = [loss(step + 1, "NaN" if step == 60_000 else value) for step, value in enumerate(values.tolist())]
    (log,) = open_log(a_run(tmp_path / "a", noisy))
    path = write_report([log], tmp_path / "report.html")
    assert path.stat().st_size < 400_000
    (curve,) = Page(path).data["charts"][0]["curves"]
    assert 77.0 in curve["values"] and None in curve["values"]
    assert np.cumsum(curve["steps"])[-1] == 100_000
    assert len(curve["means"]) == len(curve["meanSteps"]) <= 1500
    assert np.mean(curve["means"]) == pytest.approx(2, abs=0.01)


def test_many_metrics_of_many_runs_still_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dalsegno.analysis.report.MOST_BYTES", 300_000)
    generator = np.random.default_rng(0)
    logs = []
    for number in range(3):
        columns = generator.normal(size=(400, 40))
        records = [
            loss(step + 1, 1.0, **{f"m{i}": x for i, x in enumerate(row)}) for step, row in enumerate(columns.tolist())
        ]
        logs += list(open_log(a_run(tmp_path / f"run-{number}", records)))
    assert write_report(logs, tmp_path / "report.html").stat().st_size <= 300_000
    monkeypatch.setattr("dalsegno.analysis.report.MOST_BYTES", 30_000)
    with pytest.raises(ConfigurationError, match="3 runs do not fit into a report"):
        write_report(logs, tmp_path / "other.html")
    assert not (tmp_path / "other.html").exists()


def test_heatmaps_of_big_models_show_the_largest_of_neighbours() -> None:
    values = np.full((500, 1000), 1.0)
    values[123, 777] = 1e6
    values[0, 0] = np.nan
    names = tuple(f"layer {index}" for index in range(1000))
    (map_,) = payload([], [ParameterSeries("norm", "a", names, np.arange(500), values)], 1000)["heatmaps"]
    assert (len(map_["rows"]), len(map_["steps"])) == (334, 167)
    assert map_["rows"][259][41] == "z"
    assert sum(row.count("z") for row in map_["rows"]) == 1
    assert map_["parameters"][0] == "layer 0 and 2 more"
    assert (map_["low"], map_["high"]) == (1.0, 1e6)


def test_runs_of_little(tmp_path: Path) -> None:
    for number, records in enumerate(
        [[loss(1, 1.0)], [loss(1, "NaN"), loss(2, "NaN")], [{"global_step": 1, "note": "a"}]]
    ):
        logs = list(open_log(a_run(tmp_path / f"run-{number}", records)))
        assert "Summary" in Page(write_report(logs, tmp_path / "report.html")).text
    with pytest.raises(ConfigurationError, match="needs at least one run"):
        write_report([], tmp_path / "report.html")
