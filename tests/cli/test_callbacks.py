"""``dalsegno callbacks``: what there is, and what one can be given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dalsegno import callbacks
from dalsegno.cli import main


def test_the_list_has_every_builtin_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["callbacks", "list"]) == 0
    _, *table = capsys.readouterr().out.splitlines()
    lines = {line.split()[0]: line for line in table}
    assert set(callbacks.__all__) <= set(lines)
    assert "built-in" in lines["JsonLogger"]
    assert "Logs training, evaluations and the run's end as JSON lines" in lines["JsonLogger"]
    assert main(["callbacks", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == set(lines)


def test_a_broken_package_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = tmp_path / "beats-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: beats\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dalsegno.callbacks]\nGone = no_such_module:Gone\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["callbacks", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 6
    assert "'Gone', provided by beats, cannot be imported: ModuleNotFoundError" in lines[-1]


def test_an_argument_is_described_by_the_class_itself_not_by_its_base(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["callbacks", "show", "MLflowLogger", "--json"]) == 0
    described = {each["name"]: each["doc"] for each in json.loads(capsys.readouterr().out)["arguments"]}
    assert described["wait_s"] == "seconds that the end of training waits for MLflow."


def test_one_is_shown_with_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["callbacks", "show", "DivergenceDetector"]) == 0
    page = capsys.readouterr().out
    lines = {line.split()[0]: line.split("  ") for line in page.splitlines() if "  " in line}
    cells = [part.strip() for part in lines["patience"] if part]
    assert cells == ["patience", "int", "3", "number of consecutive bad observations that stops training."]
    assert "'stop' or 'abort' or 'rollback'" in [part.strip() for part in lines["action"]]
    assert "Handles on_init_end, on_log.\nHas state, saved with each checkpoint.\n" in page
    assert "Args:" not in page


def test_one_of_ones_own_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["callbacks", "show", "config.sample:Beat", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["doc"] == "Takes one of everything.\n\nLonger words."
    assert (shown["handlers"], shown["has_state"]) == (["on_step_end"], False)
    every, mode, weight, *_ = shown["arguments"]
    assert every == {
        "name": "every",
        "type": "int",
        "required": False,
        "default": "10",
        "doc": "steps from one beat to the next, at least one.",
    }
    assert (mode["type"], mode["doc"]) == ("'loud' or 'soft'", "loud, or not.")
    assert (weight["name"], weight["doc"]) == ("weight", "")
    assert main(["callbacks", "show", "config.sample:Picky", "--json"]) == 0
    (size,) = json.loads(capsys.readouterr().out)["arguments"]
    assert (size["required"], size["default"]) == (True, None)


def test_the_nearest_name_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["callbacks", "show", "JsonLoger"]) == 2
    assert capsys.readouterr().err == "dalsegno: unknown callback 'JsonLoger'; did you mean 'JsonLogger'?\n"
