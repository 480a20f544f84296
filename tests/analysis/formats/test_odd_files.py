"""Logs with values that no training writes: each is skipped by its name, and nothing fails or takes long."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dalsegno as ds
from analysis.formats.odd_files import GOOD, NUMBERS, field_of, history, odd_files, write_events, write_wandb
from dalsegno.cli import main

COMMANDS = (
    *("list LOG", "summary LOG --json", "show LOG", "tail LOG --json", "plot LOG --terminal --x time", "spikes LOG"),
    *("compare LOG good.jsonl --metrics loss", "diff LOG good.jsonl", "detect LOG --save-steps 5"),
    *("detect --good good.jsonl --bad LOG --sweep", "export LOG --to json", "export LOG --to csv"),
)


def run_all(log: Path, folder: Path) -> None:
    """All commands on a log: each ends with an exit status, without a warning, and in time."""
    for command in COMMANDS:
        words = [str(log) if word == "LOG" else word for word in command.split()]
        begun = time.process_time()
        assert main(["logs", *words]) in (0, 1, 2), (log, command)
        assert time.process_time() - begun < 5, (log, command)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    warnings.simplefilter("error")
    write(Path("good.jsonl"), [{"global_step": step, "loss": 1 / step} for step in range(1, GOOD + 1)])
    return tmp_path


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_every_command_survives_odd_values_in_every_format(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in odd_files(folder):
        log = path.parent if path.name == "meta.yaml" else path
        run_all(log, folder)
        found = ds.open_log(log)
        steps = found.metric("loss").steps.tolist() if "loss" in found.metrics() else []
        last = GOOD // 2 if path.parent.name in ("array", "hf") else GOOD  # there a value that is no JSON ends the file
        assert set(range(1, last + 1)) <= set(steps), path
        capsys.readouterr()


ODD_CURVES: dict[str, list[float]] = {
    "denormal": [5e-324 * (1 + place % 3) for place in range(99)],
    "denormal-and-zero": [5e-324 * (place % 2) for place in range(99)],
    "largest": [1.7e308 * (-1) ** place for place in range(99)],
    "all-sizes": [10.0 ** (300 - 6 * place) for place in range(99)],
    "nan": [float("nan")] * 99,
    "huge-integers": [10**400] * 99,
}


@pytest.mark.parametrize("curve", ODD_CURVES)
def test_every_command_survives_curves_of_any_size(
    folder: Path, capsys: pytest.CaptureFixture[str], curve: str
) -> None:
    names = ("loss", "eval_loss", "learning_rate", "grad_norm", "tok_per_sec")
    values = ODD_CURVES[curve]
    run_all(write(folder / "a.jsonl", [dict.fromkeys(names, v) | {"step": n} for n, v in enumerate(values)]), folder)
    for view in ("--log", "--perplexity", "--smooth 1"):
        assert main(["logs", "plot", "a.jsonl", "--terminal", *view.split()]) == 0
    assert main(["logs", "report", "a.jsonl"]) == 0


@pytest.mark.parametrize("steps", [[0, 2**53 - 1], [-(2**53) + 1, 5, 2**62, 2**63 - 1], [2**53 - 1], [7] * 30])
def test_every_command_survives_steps_far_apart(
    folder: Path, capsys: pytest.CaptureFixture[str], steps: list[int]
) -> None:
    records = [{"step": step, "loss": 1.0 / n, "epoch": 10.0 ** (300 - n)} for n, step in enumerate(steps, start=1)]
    run_all(write(folder / "a.jsonl", records), folder)
    assert main(["logs", "plot", "a.jsonl", "--terminal", "--x", "epoch"]) == 0


def test_timelines_and_numbers_without_end_take_linear_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [history({"loss": "1.0"}, step=step) for step in range(1, 5000)]
    returns = [history({"dalsegno/timeline": str(step)}, step=10**7) for step in range(1, 5000)]
    endless = [
        b"\x08" + b"\xff" * 200_000,
        history({"loss": "2.0"}, step=b"text"),
        field_of(2, 7),
        field_of(2, b"\x08"),
    ]
    messages = [each for pair in zip(steps, returns, strict=True) for each in pair]
    write_wandb(folder / "run-a.wandb", [*messages, *endless, history({"loss": "3.0"}, step=6000)])
    begun = time.process_time()
    log = ds.open_log(folder / "run-a.wandb")
    assert log.metric("loss").steps.tolist() == [*range(1, 5000), 6000]
    assert time.process_time() - begun < 5
    assert "run-a.wandb: a record is damaged: an integer of more than 64 bits" in str(log.skipped)


def test_what_is_left_out_is_named(folder: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    value = Summary(value=[Summary.Value(tag="loss", simple_value=1.0)])
    times = (float("inf"), -1.0, 1.79e9)
    events = [Event(step=step, wall_time=time, summary=value) for step, time in enumerate(times)]
    write_events(folder / "events.out.tfevents.1", events)
    log = ds.open_log(folder / "events.out.tfevents.1")
    found = list(log.records())
    assert [record.get("timestamp") for record in found] == [None, None, 1.79e9]
    assert log.skipped.sentences == [
        f"record {n}: timestamp {time} is left out" for n, time in ((1, "inf"), (2, "-1.0"))
    ]

    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    odd = {"timestamp": [1], "epoch": float("inf"), "tree": deep, "\ud800": 1, "text": "\udfff", "loss": 10**400}
    log = ds.open_log(write(folder / "a.jsonl", [{"global_step": 1, "timestamp": 1.79e9}, {"global_step": 2, **odd}]))
    assert list(log.records())[1] == {"global_step": 2, "loss": float("inf"), "kind": "train"}
    assert len(log.skipped.sentences) == 5


def test_odd_tails_and_norms_of_parameters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values: list[Any] = [1.0, 5e-324, 10**400, float("nan"), [1], "x", None, {"a": 1}]
    steps = [1, 2**63, 10**300, -5, 1.5, True, "7", None, [1]]
    write(folder / "a" / "train.jsonl", [{"global_step": 1, "loss": 1.0}, {"global_step": 2, "loss": 0.5}])
    tail = [{"global_step": step, "loss": value, "timestamp": value} for step in steps for value in values]
    write(folder / "a" / "rewound" / "train.jsonl.0001", tail)
    norms = [{"global_step": step, "norms": {"w": value, "b": 1.0}} for step in steps for value in values]
    write(folder / "a" / "gradient_norms.jsonl", norms)
    run_all(folder / "a", folder)
    assert main(["logs", "heatmap", "a"]) == 0
    assert main(["logs", "report", "a"]) == 0


fields = st.sampled_from(["global_step", "timestamp", "epoch", "kind", "loss"])
texts = st.sampled_from(NUMBERS) | st.sampled_from(["null", "true", '"x"', "[1]", '"2026-01-01"'])


@settings(max_examples=40)
@given(rows=st.lists(st.dictionaries(fields, texts), max_size=9))
def test_long_logs_are_read_like_short_ones(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]]
) -> None:
    """Polars reads long ones, and must leave out the same."""
    from dalsegno.analysis.formats import json_lines

    path = tmp_path_factory.mktemp("log") / "train.jsonl"
    good = '{"global_step": 1, "timestamp": 1.79e9, "epoch": 0.5, "loss": 1.0}\n'
    lines = ["{" + ", ".join(f'"{name}": {text}' for name, text in row.items()) + "}\n" for row in rows]
    path.write_text(good * 3 + "".join(lines) + good)
    short = ds.open_log(path)
    expected = {name: short.metric(name) for name in ("global_step", "timestamp", "epoch", *short.metrics())}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "LONG", 0)
        long = ds.open_log(path)
        for name, series in expected.items():
            np.testing.assert_array_equal(long.metric(name).steps, series.steps)
            np.testing.assert_array_equal(long.metric(name).values, series.values)
        assert long.skipped.count == short.skipped.count
