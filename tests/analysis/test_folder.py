"""From a path to the runs that lie there."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds


def log_in(folder: Path, name: str = "logs/train.jsonl", loss: float = 1.0) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"global_step": step, "loss": loss}) + "\n" for step in (1, 2)))
    return folder


def state_in(folder: Path, last: int) -> Path:
    """As Hugging Face's Trainer writes it into a checkpoint."""
    path = folder / f"checkpoint-{last}" / "trainer_state.json"
    path.parent.mkdir(parents=True)
    history = [{"step": step, "loss": 1.0} for step in range(5, last + 1, 5)]
    path.write_text(json.dumps({"global_step": last, "log_history": history}))
    return path


def test_a_run_by_its_folder_its_logs_folder_and_its_file(tmp_path: Path) -> None:
    run = log_in(tmp_path / "a")
    (run / "logs" / "gradient_norms.jsonl").write_text('{"global_step": 1, "norms": {"w": 1.0}}\n')
    for path in (run, run / "logs", run / "logs" / "train.jsonl", str(run)):
        log = ds.open_log(path)
        assert (log.name, log.source.path) == ("a", run / "logs" / "train.jsonl")


def test_a_folder_of_runs(tmp_path: Path) -> None:
    log_in(tmp_path / "a", loss=1.0)
    log_in(tmp_path / "group" / "b", loss=2.0)
    (tmp_path / "empty").mkdir()
    log_in(tmp_path / "a" / "rewound" / "timeline.0001")
    runs = ds.open_log(tmp_path)
    assert isinstance(runs, ds.RunFolder)
    assert repr(runs) == f"RunFolder({str(tmp_path)!r})"
    assert [run.name for run in runs] == ["a", "group/b"]
    assert len(runs) == 2
    assert runs["group/b"].metric("loss").values.tolist() == [2.0, 2.0]
    assert [(record["run"], record["loss"]) for record in runs.records()] == [("a", 1.0)] * 2 + [("group/b", 2.0)] * 2
    assert runs.frame()["run"].to_list() == ["a", "a", "group/b", "group/b"]
    assert runs.metrics() == ["loss"]
    assert [run.name for run in ds.open_logs([tmp_path, tmp_path / "a"])] == ["a", "group/b", "a (2)"]
    with pytest.raises(ds.ConfigurationError, match=r"contains 2 runs \(a, group/b\); choose one of them"):
        runs.metric("loss")
    with pytest.raises(ds.UnknownName, match=r"unknown run in .* 'group/c'; did you mean 'group/b'"):
        runs["group/c"]


def test_one_run_is_gone_through_as_a_folder_of_runs_is(tmp_path: Path) -> None:
    log = ds.open_log(log_in(tmp_path))
    assert (list(log), len(log)) == ([log], 1)


def test_the_journal_of_commands_is_not_a_log(tmp_path: Path) -> None:
    (tmp_path / "control.jsonl").write_text('{"kind": "acted", "time": 1.0, "id": "a", "step": 3, "script": {}}\n')
    with pytest.raises(ds.NotFound):
        ds.open_log(tmp_path)


def test_loose_files_are_a_run_each(tmp_path: Path) -> None:
    log_in(tmp_path, "x.jsonl", 1.0)
    log_in(tmp_path, "y.jsonl", 2.0)
    (tmp_path / "data.jsonl").write_text('{"text": "not a log"}\n')
    (tmp_path / "config.json").write_text('{\n  "step": 3\n}\n')
    assert [run.name for run in ds.open_log(tmp_path)] == ["x", "y"]


def test_a_log_that_had_to_move_goes_on_in_its_successor(tmp_path: Path) -> None:
    log_in(tmp_path, "logs/train.jsonl", 1.0)
    log_in(tmp_path, "logs/train-2.jsonl", 2.0)
    assert ds.open_log(tmp_path).metric("loss").values.tolist() == [2.0, 2.0]


def test_an_open_log_is_followed_into_the_file_in_which_it_goes_on(tmp_path: Path) -> None:
    """``train-2.jsonl``, or the newest checkpoint's state, as Hugging Face writes it; older checkpoints are deleted."""
    moved = ds.open_log(log_in(tmp_path / "moved"))
    assert moved.metric("loss").values.tolist() == [1.0, 1.0]
    log_in(tmp_path / "moved", "logs/train-2.jsonl", loss=2.0)
    assert moved.metric("loss").values.tolist() == [2.0, 2.0]
    assert [record["loss"] for record in moved.records()] == [2.0, 2.0]
    first = state_in(tmp_path / "hf", 5)
    log = ds.open_log(tmp_path / "hf")
    assert log.metric("loss").steps.tolist() == [5]
    second = state_in(tmp_path / "hf", 10)
    first.unlink()
    assert log.metric("loss").steps.tolist() == [5, 10]
    assert (log.source.path, len(list(log.records())), log.frame().height) == (second, 2, 2)


def test_a_file_that_was_replaced_is_read_anew_and_one_that_is_gone_is_named(tmp_path: Path) -> None:
    path = log_in(tmp_path, "x.jsonl") / "x.jsonl"
    log = ds.open_log(path)
    assert len(log.metric("loss")) == 2
    log_in(tmp_path, "y.jsonl", loss=7.0)
    (tmp_path / "y.jsonl").replace(path)
    assert log.metric("loss").values.tolist() == [7.0, 7.0]
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"x\.jsonl"):
        log.metric("loss")


def test_what_cannot_be_looked_into_hides_no_log_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = log_in(tmp_path / "a")
    (run / "logs" / "circle.json").symlink_to("circle.json")
    state, stat = state_in(run, 10), os.stat

    def denied(path: object, *args: Any, **named: Any) -> os.stat_result:
        if path == state:  # as if the checkpoint were another user's; root may look into all
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *args, **named)

    monkeypatch.setattr(os, "stat", denied)
    assert list(ds.open_log(run).metric("loss").values) == [1.0, 1.0]


def test_a_folder_without_logs_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ds.NotFound, match=r"no log in it; looked for logs/train.jsonl, .* event files"):
        ds.open_log(tmp_path)
    with pytest.raises(ds.NotFound, match="no such file or folder"):
        ds.open_log(tmp_path / "nowhere")


def test_a_file_that_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ds.ConfigurationError, match="not a log that dalsegno can read; it reads JSON lines"):
        ds.open_log(path)


def test_norms_of_parameters(tmp_path: Path) -> None:
    run = log_in(tmp_path / "a")
    (run / "logs" / "gradient_norms.jsonl").write_text(
        '{"global_step": 1, "norms": {"w": 1.0, "b": 2.0}}\n{"global_step": 2, "norms": {"w": "NaN", "c": 4.0}}\n{"glo'
    )
    log = ds.open_log(run)
    norms = log.parameters("grad_norm")
    assert norms.parameters == ("w", "b", "c")
    assert norms.steps.tolist() == [1, 2]
    assert str(norms.values.tolist()) == "[[1.0, 2.0, nan], [nan, nan, 4.0]]"
    assert log.skipped.count == 1
    with pytest.raises(ds.NotFound, match="parameter_norms"):
        log.parameters("spectral_norm")
    with pytest.raises(ds.UnknownName, match="unknown metric of parameters 'grad'; did you mean 'grad_norm'"):
        log.parameters("grad")


def test_a_file_beside_runs_hides_none_of_them(tmp_path: Path) -> None:
    """As an export does, that was written there."""
    log_in(tmp_path / "a")
    log_in(tmp_path / "b")
    log_in(tmp_path, "exported.json", 2.0)
    assert [run.name for run in ds.open_log(tmp_path)] == ["exported", "a", "b"]


def test_event_files_below_a_log_are_of_the_same_run(tmp_path: Path) -> None:
    log_in(tmp_path / "run", "metrics.jsonl")
    (tmp_path / "run" / "tensorboard").mkdir()
    (tmp_path / "run" / "tensorboard" / "events.out.tfevents.1").write_bytes(b"")
    assert ds.open_log(tmp_path / "run").name == "run"
    assert [run.name for run in ds.open_log(tmp_path)] == ["run"]


def test_what_was_skipped_in_several_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        file = log_in(tmp_path / name) / "logs" / "train.jsonl"
        file.write_text(file.read_text() + '{"glo')
    folder = ds.open_log(tmp_path)
    for read in (lambda: list(folder.records()), folder.frame):
        read()
        assert folder.skipped.count == 2
        assert [sentence.split(",")[0] for sentence in folder.skipped.sentences] == [
            "a: line 3: torn",
            "b: line 3: torn",
        ]


def test_a_run_is_the_same_from_wherever_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = log_in(tmp_path / "a")
    (run / "run.json").write_text("{}")
    monkeypatch.chdir(run / "logs")
    assert ds.open_log(".").output_dir == run
    log_in(tmp_path, "exported.json")
    monkeypatch.chdir(run)
    assert ds.open_log(Path("..") / "exported.json").output_dir is None


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["x/run", "y/run"], ["x/run", "y/run"]),
        (["x/run", "y/run/logs/train.jsonl", "z/other"], ["x/run", "y/run", "other"]),
        (["x/1/run", "x/2/run", "y/1/run"], ["x/1/run", "2/run", "y/1/run"]),
        (["x/run", "x/run/logs", "x/run/logs/train.jsonl"], ["run", "run (2)", "run (3)"]),
        (["x/run", "x/run", "y/run"], ["x/run", "x/run (2)", "y/run"]),
    ],
)
def test_no_two_runs_have_one_name(paths: list[str], names: list[str], tmp_path: Path) -> None:
    for run in ("x/run", "x/1/run", "x/2/run", "y/run", "y/1/run", "z/other"):
        log_in(tmp_path / run)
    opened = ds.open_logs(tmp_path / path for path in paths)
    assert [run.name for run in opened] == names
    assert [run.metric("loss").run for run in opened] == names
