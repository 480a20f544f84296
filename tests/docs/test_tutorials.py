"""What the tutorials show is what the examples have, runs, or is a command that exists."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.cli import _parser, main
from dalsegno.logs import read_records
from dalsegno.testing import TinyRegression, tiny_regression_data

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def blocks(name: str, language: str) -> list[str]:
    found: list[str] = re.findall(
        rf"```{language}\n(.*?)```", (ROOT / "docs" / "tutorials" / f"{name}.md").read_text(), re.DOTALL
    )
    return found


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_commands_of_a_tutorial_exist(page: Path) -> None:
    for line in re.findall(r"^\$ (.*)$", page.read_text(), re.MULTILINE):
        words = shlex.split(line, comments=True)
        if words[0] == "dalsegno":
            _, unknown = _parser(words[1:]).parse_known_args(words[1:])
            assert unknown == [], line
        for word in words:
            assert not word.startswith("docs/") or (ROOT / word).is_file(), line


@pytest.mark.parametrize(
    ("tutorial", "example", "language"),
    [("own-loop", "own_loop.py", "python"), ("slurm", "train.sbatch", "bash")],
)
def test_a_tutorial_shows_lines_of_its_example(tutorial: str, example: str, language: str) -> None:
    program = {line.strip() for line in (ROOT / "docs" / "examples" / example).read_text().splitlines()}
    shown = {line.strip() for block in blocks(tutorial, language) for line in block.splitlines()}
    assert shown <= program


def test_the_spike_of_the_tutorial_is_healed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("spike", "python")
    exec(code, {})  # our own page
    lost, healed = (ds.open_log(Path("runs") / name).summary() for name in ("lost", "healed"))
    assert (lost.rollbacks, healed.rollbacks, healed.redone_steps) == (0, 1, 28)
    assert lost.loss is not None and lost.loss.not_finite > 0
    assert healed.loss is not None and healed.loss.not_finite == 0 and healed.loss.final < 0.2
    capsys.readouterr()
    main(["logs", "lineage", "runs/healed"])
    main(["logs", "detect", "runs/lost", "--save-steps", "25", "--margin", "10"])
    printed = capsys.readouterr().out
    assert "step 103: back to step 75, by DivergenceDetector: loss diverged at step 103" in printed
    assert "lost      200       103       75  diverges" in printed


class Domains(TinyRegression):
    """Its batches name their domain."""

    def forward(self, x: Any, y: Any, domain: Any, input_ids: Any) -> Any:
        return super().forward(x, y)


def test_the_callback_of_the_tutorial_counts_and_survives(tmp_path: Path) -> None:
    (code,) = blocks("own-callback", "python")
    names: dict[str, Any] = {}
    exec(code, names)  # our own page
    data = tiny_regression_data(16)
    rows = [{**data[index], "domain": "ab"[index % 2], "input_ids": torch.zeros(3)} for index in range(16)]
    for steps in (2, 4):  # the second trainer resumes
        args = ds.TrainingArguments(
            tmp_path, max_steps=steps, save_steps=1, logging_steps=1, per_device_train_batch_size=1, use_cpu=True
        )
        own = [names["TokensPerDomain"](), JsonLogger()]
        ds.Trainer(Domains(), args, train_dataset=rows, callbacks=own).train()
    counts = [
        sum(value for name, value in record.items() if name.startswith("tokens/"))
        for record in read_records(tmp_path / "logs" / "train.jsonl")
        if "grad_norm" in record
    ]
    assert counts == [3, 6, 9, 12]


def test_the_lines_of_python_that_read_a_log_run(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests" / "golden" / "logs" / "killed", tmp_path / "runs" / "a")
    (code,) = blocks("reading-logs", "python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0
