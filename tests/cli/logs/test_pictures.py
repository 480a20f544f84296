"""The commands that write files: what they write, what they print, and what they refuse."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from dalsegno.cli import main

GOLDEN = Path(__file__).parents[2] / "golden" / "logs"
BEGINS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", ".html": b"<!doctype html>"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["plot", "killed"], "plot.png"),
        (["plot", "killed", "pair-a", "--metrics", "loss,grad_norm", "--compare", "--x", "time"], "plot.png"),
        (["plot", "killed", "diverged", "--log", "--perplexity", "--smooth", "3", "--format", "svg"], "plot.svg"),
        (["plot", "killed", "--xlim", "5:", "--ylim=-1:9", "--ignore-outliers", "-o", "a.pdf"], "a.pdf"),
        (["plot", "killed", "-o", "v1.2", "--format", "png"], "v1.2.png"),
        (["heatmap", "killed"], "heatmap.png"),
        (["heatmap", "pair-a", "--metric", "spectral_norm", "-f", "weight", "-o", "b.svg"], "b.svg"),
        (["plot", "killed", "pair-a", "--loss-curves", "--labels", "one", "two", "--x-axis", "epoch"], "plot.png"),
        (["plot", "--compare", "killed", "pair-a", "--log-scale", "--title", "Two", "-o", "two.svg"], "two.svg"),
        (["heatmap", "killed", "--step-stride", "2", "--vmin", "0.01", "--vmax", "9", "--log-scale"], "heatmap.png"),
        (["heatmap", "killed", "--figsize", "6", "4", "--title", "Norms", "-o", "n.svg"], "n.svg"),
        (["heatmap", "killed", "--linear", "--vmin", "-1", "--vmax", "0"], "heatmap.png"),
        (["compare", "pair-a", "pair-b", "-o", "c.png"], "c.png"),
        (["report", "killed", "pair-b", "--title", "Two runs"], "report.html"),
        (["report", "diverged", "-o", "d.html"], "d.html"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_written(
    words: list[str], written: str, as_json: bool, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(GOLDEN / word) if (GOLDEN / word / "run.json").exists() else word for word in words]
    assert main(["logs", *words, *(["--json"] if as_json else [])]) in (0, 1)
    assert (here / written).read_bytes().startswith(BEGINS[Path(written).suffix])
    assert [path.name for path in here.iterdir()] == [written]
    printed = capsys.readouterr().out
    if not as_json:
        assert f"wrote {written}" in printed
    elif words[0] != "compare":
        assert json.loads(printed)["file"] == written


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["plot", "killed", "-o", "a.bmp"], "-o a.bmp: must end in .png, .svg, .pdf"),
        (["plot", "killed", "-o", "a.png", "--format", "svg"], "-o a.png contradicts --format svg"),
        (["plot", "killed", "-o", "nowhere/a.png"], "there is no directory nowhere"),
        (["plot", "killed", "--metrics", "los"], "unknown metric 'los'; did you mean 'loss'?"),
        (["plot", "killed", "--smooth", "0"], "smooth is 0"),
        (["plot", "killed", "--terminal", "--json"], "leave one of them out"),
        (["plot", "nobody"], "nobody: no such file or folder"),
        (["plot"], ".: no log in it"),
        (["plot", "killed", "--labels", "one", "two"], "--labels: 2 names for 1 runs"),
        (["plot", "killed", "--loss-curves", "--metrics", "loss"], "leave one of them out"),
        (["heatmap", "killed", "--step-stride", "0"], "stride is 0"),
        (["heatmap", "killed", "--vmin", "2", "--vmax", "1"], "the lowest value must be below the highest"),
        (["heatmap", "killed", "--vmin", "0"], "limits (0.0, None): need numbers over 0"),
        (["heatmap", "killed", "--linear", "--vmin", "nan"], "limits (nan, None): need finite numbers"),
        (["heatmap", "killed", "--figsize", "0", "4"], "needs numbers over 0"),
        (["plot", "killed", "--terminal", "-e"], "leave one of them out"),
        (["summary", "killed", "--all"], "leave one of them out"),
        (["summary", "killed", "-o", "nowhere/a.txt"], "there is no directory nowhere"),
        (["heatmap", "killed", "-f", "nothing"], "no parameter of killed matches 'nothing'"),
        (["compare", "killed"], "a comparison needs at least two"),
        (["detect"], "no runs given: name them as"),
        (["detect", "killed", "--sweep"], "a sweep needs both good and bad runs"),
        (["detect", "killed", "--patience", "0"], "patience is 0"),
        (["report", "killed", "-o", "nowhere/a.html"], "name a file in an existing directory"),
    ],
)
def test_what_is_refused(words: list[str], complaint: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(GOLDEN / word) if (GOLDEN / word / "run.json").exists() else word for word in words]
    assert main(["logs", *words]) == 2
    assert complaint in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_without_a_run_the_newest_is_taken(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("pair-a", "killed", "pair-b")):
        log = shutil.copytree(GOLDEN / name, here / "runs" / name) / "logs" / "train.jsonl"
        os.utime(log, (1e9 + 7 * (number % 2), 1e9 + 7 * (number % 2)))
    for command in (["summary"], ["plot", "--terminal"], ["heatmap", "--json"], ["summary", "-o", "a.txt"]):
        assert main(["logs", *command]) == 0
        printed = capsys.readouterr().out
        assert ("killed" in printed and "pair" not in printed) or command[-1] == "a.txt"
    assert (here / "a.txt").read_text().startswith("runs/killed\n")
    assert main(["logs", "summary", "--all", "--format", "one-line", "-o", "all.txt"]) == 0
    assert [line.split()[0] for line in (here / "all.txt").read_text().splitlines()] == [
        *("runs/killed", "runs/pair-a", "runs/pair-b")
    ]
    assert main(["logs", "summary", "-o", "a.txt"]) == 2
    assert "a.txt exists; --force overwrites it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        (["heatmap", "--metric", "spectral_norm"], "runs/pair-a"),
        (["heatmap"], "runs/killed"),
        (["plot", "--metrics", "grad_norm"], "runs/killed"),
        (["plot"], "runs/other"),
    ],
)
def test_without_a_run_the_newest_that_has_it_is_taken(
    words: list[str], taken: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the newest of all: that one has a loss only, and the next no spectral norms."""
    for age, name in enumerate(("killed", "pair-a"), start=1):
        log = shutil.copytree(GOLDEN / name, here / "runs" / name) / "logs" / "train.jsonl"
        os.utime(log, (1e9 - age, 1e9 - age))
    (here / "runs/other").mkdir()
    (here / "runs/other/log.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    norms = here / "runs/killed/logs/parameter_norms.jsonl"
    records = [json.loads(line) for line in norms.read_text().splitlines()]
    norms.write_text("".join(json.dumps({**each, "spectral_norms": None}) + "\n" for each in records))
    assert main(["logs", *words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.get("run", *printed.get("runs", [])) == taken


@pytest.mark.parametrize("words", [["plot", "killed"], ["heatmap", "killed"]])
def test_the_picture_is_opened_with_the_users_editor(
    words: list[str], here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In VS Code's terminal in VS Code, elsewhere with what the environment names."""
    words = ["logs", words[0], str(GOLDEN / words[1]), "-e", "--force"]
    for name in ("VISUAL", "EDITOR", "TERM_PROGRAM"):
        monkeypatch.delenv(name, raising=False)
    assert main(words) == 2
    assert "neither $VISUAL nor $EDITOR is set; set EDITOR to a program" in capfd.readouterr().err
    monkeypatch.setenv("EDITOR", "no-such-editor --wait")
    assert main(words) == 2
    assert "'no-such-editor --wait' is not a program here" in capfd.readouterr().err
    assert list(here.iterdir()) == []
    monkeypatch.setenv("EDITOR", "echo shows --wait")
    assert main(words) == 0
    assert capfd.readouterr().out.endswith(f"shows --wait {words[1]}.png\n")
    (here / "bin").mkdir()
    (here / "bin/code").write_text('#!/bin/sh\necho "VS Code shows $1"\n')
    (here / "bin/code").chmod(0o755)
    monkeypatch.setenv("PATH", str(here / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("TERM_PROGRAM", "vscode")
    assert main([*words, "-o", "a.svg"]) == 0
    assert capfd.readouterr().out.endswith("VS Code shows a.svg\n")


def test_labels_and_titles_are_in_the_picture(here: Path) -> None:
    runs = [str(GOLDEN / name) for name in ("killed", "pair-a")]
    options = ["--compare", "--labels", "first", "second", "--title", "Seen twice", "-o", "a.svg"]
    assert main(["logs", "plot", *runs, *options]) == 0
    picture = (here / "a.svg").read_text()
    assert all(f"<!-- {text} -->" in picture for text in ("first", "second", "Seen twice"))


@pytest.mark.parametrize(("second", "status"), [("pair-a", 0), ("killed", 1), ("pair-b", 1)])
def test_a_quiet_diff_is_its_exit_status(second: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "diff", "-q", str(GOLDEN / "pair-a"), str(GOLDEN / second)]) == status
    assert capsys.readouterr() == ("", "")
