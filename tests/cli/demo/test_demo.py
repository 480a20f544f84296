"""``dalsegno demo``, small: killed twice, the same, drawn; and what it does to a folder that is there already."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.command import DALSEGNO, dalsegno, environment
from dalsegno.cli import main
from dalsegno.cli.demo import story
from dalsegno.cli.demo.story import Job, LegEnd, Watch, run_leg
from dalsegno.testing import FaultPlan
from support.warm import Program

COMPARED = [
    "weights",
    "optimizer",
    "learning rate",
    "data position",
    "data order",
    "random generators",
    "callback DivergenceDetector",
    "callback GradNormLogger",
    "callback JsonLogger",
    "log gradient_norms.jsonl",
    "log train.jsonl",
]


def legs_of(output_dir: Path) -> list[dict[str, Any]]:
    legs: list[dict[str, Any]] = json.loads((output_dir / "run.json").read_text())["legs"]
    return legs


def test_the_whole_story(tmp_path: Path) -> None:
    done = dalsegno("demo", "--steps", "12", "--out", "here", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for what in COMPARED:
        assert re.search(rf"^{what} +[\d,]+ \w+ +identical$", done.stdout, re.MULTILINE), (what, done.stdout)
    assert re.search(r"killed with SIGKILL between steps \d+ and \d+\n", done.stdout)
    assert re.search(r"killed with SIGKILL while saving step \d+, before write \d of \d+\n", done.stdout)
    assert re.search(r"without a manifest: step-\d+\.partial\n", done.stdout)
    assert done.stdout.count("resumes from the checkpoint of step") == 2
    assert len(re.findall(r"later log records moved to rewound/train\.jsonl\.\d+\n", done.stdout)) == 2
    assert len(re.findall(r"resumed exactly: steps \d+ to \d+ repeated bit for bit", done.stdout)) == 2
    assert "Nothing differs." in done.stdout
    assert (tmp_path / "here" / "loss.png").read_bytes().startswith(b"\x89PNG")
    legs = legs_of(tmp_path / "here" / "killed")
    assert [leg["reason"] for leg in legs] == ["died", "died", "finished"]
    assert len({leg["pid"] for leg in legs}) == 3


def test_a_difference_is_exit_status_1_and_without_matplotlib_only_the_plot_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_a_seed_of_its_own(job: Job, plan: FaultPlan | None, watch: Watch) -> LegEnd:
        end = run_leg(replace(job, seed=job.seed + (job.output_dir.name == "reference")), plan, watch)
        # As on a slow disk: the training has gone on while the save was under way.
        return replace(end, last=end.last + 1) if plan is not None and plan.operation is not None else end

    monkeypatch.setattr(story, "run_leg", with_a_seed_of_its_own)
    (tmp_path / "mine.txt").touch()
    (tmp_path / "demo.json").touch()  # an earlier demo was here
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "left over").touch()
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert main(["demo", "--steps", "12", "--out", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "THE RUNS DIFFER." in text
    assert "No plot of both losses: matplotlib is not installed; in a clone of dalsegno, pip install -e" in text
    assert not (tmp_path / "loss.png").exists()
    assert re.search(
        r"while saving step (\d+), before write \d of \d+\n.*partial checkpoint.*step-0*\1\.partial\n", text
    )
    assert re.search(r"^weights +28 tensors +\S+: [\d,]+ of [\d,]+ elements differ", text, re.MULTILINE)
    assert not (tmp_path / "reference" / "left over").exists()
    assert (tmp_path / "mine.txt").exists()


def test_an_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    child = Program(
        [DALSEGNO, "demo", "--steps", "5000", "--out", tmp_path],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None and child.stderr is not None
    while "starts from scratch" not in child.stdout.readline():
        assert child.poll() is None
    (leg,) = legs_of(tmp_path / "reference")
    child.send_signal(signal.SIGINT)
    assert (child.wait(), child.stderr.read()) == (130, "\ndalsegno: interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.kill(leg["pid"], 0)
    assert legs_of(tmp_path / "reference")[0]["reason"] is None, "it trained on until it found nobody to tell"


def test_a_folder_of_somebody_elses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").touch()
    (tmp_path / "reference").mkdir()
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "contains files that no demo wrote" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"thesis.tex", "reference"}
    assert main(["demo", "--out", str(tmp_path / "thesis.tex")]) == 2
    assert "not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--steps", "11"], "--steps 11: two kills need at least 12 steps"),
        (["--seed", "-1"], "--seed -1: must be at least 0"),
    ],
)
def test_arguments_that_cannot_work(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--out", str(tmp_path / "new"), *words]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
