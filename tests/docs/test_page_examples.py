"""The examples on all pages: each command exists, each block of Python fits today's names and signatures, and runs.

Tutorials, the pages about other libraries, and CONTRIBUTING.md are run by other tests.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from dalsegno.cli import _parser
from support.fragments import blocks, mismatches, run, scene
from support.pages import ROOT, few_steps

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RUN_ELSEWHERE = ("docs/learn/", "docs/coming-from/", "CONTRIBUTING.md")
GOLDEN = ROOT / "tests" / "golden" / "logs"
NOT_RUN = {
    "docs/reference/callbacks/averages.md": ["ds.export_model(", "with merge.averaged()"],  # of a run of the reader's
    "docs/reference/callbacks/control.md": ["study.optimize(", "step-00010000"],  # twenty trials
    "docs/guides/moving.md": ["ds.export_model(", "ds.export_adapters("],
    "docs/guides/launch.md": ["ray.train"],  # test_clusters.py runs it, under Ray
    "docs/guides/parallel.md": ["init_process_group()", "init_device_mesh("],  # on several ranks
    "docs/guides/save-and-resume.md": ["step-00010000"],
    "docs/guides/own-loop.md": ["run.accumulate(model)"],  # inside the loop of the block before it
    "docs/reference/diloco.md": ["with DiLoCoWorker("],  # needs a server
    "docs/reference/http.md": ["trainer.commands", "send("],  # while another process trains
    "docs/reference/saving.md": ["AutoModelForCausalLM"],  # a download
    "docs/guides/testing.md": ["from my_run import"],
}
"""By page, a text of each block that is only checked, because what it needs is not here."""


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_commands_on_pages_exist() -> None:
    for page in PAGES:
        for line in re.findall(r"^\$ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            words = shlex.split(line.removesuffix("\\"), comments=True)
            if "dalsegno" in words:
                command = words[words.index("dalsegno") + 1 :]
                _, unknown = _parser(command).parse_known_args(command)
                assert unknown == [], f"{page.name}: {line}"
            for word in words:
                assert not word.startswith("docs/") or (ROOT / word).is_file(), f"{page.name}: {line}"


WITH_PYTHON = [page for page in PAGES if not named(page).startswith(RUN_ELSEWHERE) and blocks(page)]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=named)
def test_python_of_a_page_fits_and_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificate: tuple[Path, Path]
) -> None:
    codes = blocks(page)
    assert list(mismatches(codes)) == []
    not_run = NOT_RUN.get(named(page), [])
    assert [text for text in not_run if not any(text in code for code in codes)] == []
    monkeypatch.chdir(tmp_path)
    _write_files_of_the_reader(certificate)
    variables = scene()
    with few_steps():
        for code in codes:
            if not any(text in code for text in not_run):
                run(code, variables)


def _write_files_of_the_reader(certificate: tuple[Path, Path]) -> None:
    for name, log in (("baseline", "killed"), ("twice", "pair-b")):
        shutil.copytree(GOLDEN / log, Path("runs") / name)
    Path("run.toml").write_text('callbacks = ["JsonLogger"]\n', encoding="utf-8")
    Path("prompts.yaml").write_text("- the dog\n", encoding="utf-8")
    for file in certificate:
        shutil.copy(file, file.name)
