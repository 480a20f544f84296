"""Each program of docs/examples survives a kill bit by bit; the notebook and the Slurm script run as they are."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.logs import read_records
from dalsegno.testing import FaultPlan, assert_resume_equivalent
from support import examples
from support.examples import EXAMPLES


@pytest.mark.parametrize(
    ("factory", "ranks", "step", "needs"),
    [
        (examples.char_gpt, 1, 5, ()),
        (examples.digits_cnn, 1, 30, ("sklearn",)),  # in the second epoch
        (examples.lora, 1, 5, ("peft", "transformers")),
        (examples.own_loop, 1, 5, ()),
        (examples.fsdp, 2, 5, ()),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_example_survives_a_kill(
    factory: Callable[[Path], Any], ranks: int, step: int, needs: tuple[str, ...], tmp_path: Path
) -> None:
    for name in needs:
        pytest.importorskip(name)
    kill = FaultPlan(event=ds.Event.STEP_BEGIN, count=step)
    assert_resume_equivalent(factory, kill_at=[kill], world_size=ranks, folder=tmp_path)


def test_every_example_is_tested() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py")}
    assert programs == {"char_gpt", "digits_cnn", "lora", "own_loop", "fsdp"}
    others = {path.name for path in EXAMPLES.iterdir() if path.is_file() and path.suffix != ".py"}
    assert others == {"notebook.ipynb", "train.sbatch"}


def run_cells(cells: list[str], variables: dict[str, Any]) -> None:
    for cell in cells:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(cell, variables)  # our own file


def test_the_cells_of_the_notebook_run_and_run_again_after_a_restart_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    half = next(number for number, cell in enumerate(code) if "steps=100" in cell)
    run_cells(code[:half], {})
    records = list(read_records(Path("runs/notebook/logs/train.jsonl")))
    second: dict[str, Any] = {}
    run_cells(code, second)
    assert second["trainer"].state.global_step == 100
    longer = list(read_records(Path("runs/notebook/logs/train.jsonl")))
    assert longer[: len(records) - 1] == records[:-1]  # but for the final record of the shorter run


def test_the_slurm_script_starts_the_example_on_every_gpu(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    words = [bash, str(EXAMPLES / "train.sbatch"), "runs/gpt"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    command = done.stdout.split()
    assert command == ["dalsegno", "launch", "--nproc", "auto", "docs/examples/char_gpt.py", "runs/gpt"]
    assert (EXAMPLES.parents[1] / command[4]).is_file()
