"""Each tutorial runs as it is printed, in an empty folder, and its commands print what it shows.

So does the first program of the README, which is killed and started again.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

import dalsegno as ds
from dalsegno.analysis import open_log
from dalsegno.logs import read_records
from dalsegno.testing import FaultPlan, start_ranks
from support.fragments import blocks
from support.pages import ROOT, forget_modules_of, run_page, write_files

TUTORIALS = sorted((ROOT / "docs" / "learn").glob("*.md"))
NEEDS = {"lora": ("transformers", "peft")}
BEGINS_WITH = {"two-gpus": "first-run"}
"""The page whose files a page uses."""


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_it_is_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEEDS.get(page.stem, ()):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    if page.stem in BEGINS_WITH:
        write_files(page.with_stem(BEGINS_WITH[page.stem]))
    try:
        run_page(page)
    finally:
        forget_modules_of(tmp_path)
    results = {"own-callback": _counts_survive, "spike": _spike_is_healed}
    results.get(page.stem, lambda: None)()


def _counts_survive() -> None:
    records = list(read_records(Path("runs/domains/logs/train.jsonl")))
    counts = [record["tokens/web"] + record["tokens/code"] for record in records if "grad_norm" in record]
    assert counts == [32 * step for step in (10, 20, 30, 40)]


def _spike_is_healed() -> None:
    lost, healed = (open_log(Path("runs") / name).summary() for name in ("lost", "healed"))
    assert (lost.rollbacks, healed.rollbacks, healed.redone_steps) == (0, 1, 28)
    assert lost.loss is not None and lost.loss.not_finite > 0
    assert healed.loss is not None and healed.loss.not_finite == 0 and healed.loss.final < 0.2


def test_the_first_program_of_the_readme_resumes_after_a_kill(tmp_path: Path) -> None:
    program = tmp_path / "gpt.py"
    program.write_text(blocks(ROOT / "README.md")[0], encoding="utf-8")
    for count in (54, 8):
        plan = FaultPlan(event=ds.Event.STEP_END, count=count)
        (outcome,) = start_ranks(_killed_at, 1, program, plan).wait()
        assert outcome.was_killed, outcome.error
    first, second = open_log(tmp_path / "runs" / "gpt").lineage()
    assert (first.leg.reason, second.leg.from_checkpoint) == ("died", "checkpoints/step-00000050")
    assert second.leg.resumed is not None and second.leg.resumed.line.startswith("resumed exactly: steps 51 to 5")


def _killed_at(program: Path, plan: FaultPlan) -> None:
    os.chdir(program.parent)
    plan.arm()
    runpy.run_path(str(program), run_name="__main__")
