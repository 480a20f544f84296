"""The trackers of transformers' callbacks: the same points as under its own Trainer, and all steps after a kill."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from interop.hf import tracked

Points = set[tuple[str, int]]
"""Names and steps; the values differ, since the data's order does."""


def of_trackio(folder: Path) -> Points:
    points: Points = set()
    for database in (folder / "store").glob("*.db"):
        connection = sqlite3.connect(database)
        for (text,) in connection.execute("SELECT metrics FROM metrics"):
            values = json.loads(text)
            step = values.pop("train/global_step")
            points |= {(name, step) for name in values if not name.startswith("train/train_")}
        connection.close()
    return points


def of_codecarbon(folder: Path) -> Points:
    """A row for each process that has ended."""
    with (folder / "run" / "emissions.csv").open() as file:
        return {("emissions", row) for row, _ in enumerate(csv.DictReader(file))}


def of_dvclive(folder: Path) -> Points:
    """A point's step counts the records."""
    points: Points = set()
    metrics = folder / "dvclive" / "plots" / "metrics"
    for path in metrics.rglob("*.tsv"):
        with path.open() as file:
            rows = csv.DictReader(file, delimiter="\t")
            name = path.relative_to(metrics).with_suffix("").as_posix()
            points |= {(name, int(row["step"])) for row in rows}
    return {(name, step) for name, step in points if not name.startswith("train/")}


def of_comet(folder: Path) -> Points:
    points: Points = set()
    for archive in (folder / "store").glob("*.zip"):
        with zipfile.ZipFile(archive) as opened:
            if not opened.namelist():  # of a process that was killed
                continue
            messages = [json.loads(line)["payload"] for line in opened.read("messages.json").splitlines()]
        metrics = [each["metric"] for each in messages if each.get("metric")]
        points |= {(each["metricName"], each["step"]) for each in metrics if each.get("step") is not None}
    return {(name, step) for name, step in points if not name.startswith("sys.")}


def of_clearml(folder: Path) -> Points:
    points: Points = set()
    for path in (folder / "store" / "offline").glob("*/metrics.jsonl"):
        for line in path.read_text().splitlines():
            scalars = [each for each in json.loads(line) if each["type"] == "training_stats_scalar"]
            points |= {(f"{each['metric']}/{each['variant']}", each["iter"]) for each in scalars}
    return {(name, step) for name, step in points if not name.startswith((":monitor", "train/train_"))}


@dataclass(frozen=True)
class Tracker:
    package: str
    points: Callable[[Path], Points]
    variables: dict[str, str]
    has_steps: bool = True
    """Whether a point's number is the training step."""


TRACKERS = {
    "TrackioCallback": Tracker("trackio", of_trackio, {"TRACKIO_DIR": "{folder}/store"}),
    "CodeCarbonCallback": Tracker("codecarbon", of_codecarbon, {}, has_steps=False),
    "DVCLiveCallback": Tracker("dvclive", of_dvclive, {"DVC_NO_ANALYTICS": "1"}, has_steps=False),
    "CometCallback": Tracker(
        "comet_ml",
        of_comet,
        {"COMET_START_ONLINE": "0", "COMET_OFFLINE_DIRECTORY": "{folder}/store", "COMET_API_KEY": "none"},
    ),
    "ClearMLCallback": Tracker(
        "clearml",
        of_clearml,
        {"CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": "{folder}/store", "CLEARML_LOG_MODEL": "FALSE"},
    ),
}


def run(name: str, place: str, folder: Path, killed_at: int = 0) -> Points:
    tracker = TRACKERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    variables = {key: value.format(folder=folder) for key, value in tracker.variables.items()}
    command = [sys.executable, tracked.__file__, name, place, str(folder), str(killed_at)]
    path = os.pathsep.join(each for each in sys.path if each)
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGKILL if killed_at else 0), done.stderr[-3000:]
    return tracker.points(folder) if not killed_at else set()


@pytest.mark.parametrize("name", TRACKERS)
def test_the_points_of_their_own_trainer_and_of_a_killed_run(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(TRACKERS[name].package) is None:
        pytest.skip(f"{TRACKERS[name].package} is not installed")
    theirs = run(name, "there", tmp_path / "there")
    whole = run(name, "here", tmp_path / "here")
    assert theirs
    assert theirs <= whole, "records here have more entries"
    run(name, "here", tmp_path / "killed", killed_at=25)
    resumed = run(name, "here", tmp_path / "killed")
    assert resumed
    if TRACKERS[name].has_steps:  # what the killed process has not sent yet is lost with it
        assert resumed <= whole
        assert resumed >= {(series, step) for series, step in whole if step > 20}
