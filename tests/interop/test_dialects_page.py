"""docs/coming-from: whole programs, and the examples of each dialect, fit today's names and signatures, and run."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from dalsegno.analysis import open_log
from interop.libraries import EXAMPLES
from support.fragments import blocks_of, mismatches, run, scene

FOLDER = Path(__file__).parents[2] / "docs" / "coming-from"
SECTIONS = [
    section
    for page in sorted(FOLDER.glob("*.md"))
    for section in re.split(r"^## .*\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
]


def test_the_example_of_several_libraries_fits() -> None:
    codes = blocks_of((FOLDER / "index.md").read_text(encoding="utf-8"))
    assert codes and list(mismatches(codes)) == []


@pytest.mark.parametrize("library", ["hugging-face", "lightning"])
def test_a_program_of_the_library_and_the_same_here_run(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (FOLDER / f"{library}.md").read_text(encoding="utf-8")
    codes = blocks_of(page.partition("## Your program here\n")[2].partition("\n## ")[0])
    assert codes and list(mismatches(codes)) == []
    monkeypatch.chdir(tmp_path)
    variables: dict[str, object] = {}
    for code in codes:
        exec(code, variables)  # our own page
    assert open_log(Path("runs/a")).summary().state == "finished"


@pytest.mark.parametrize("library", EXAMPLES.values(), ids=EXAMPLES)
def test_the_examples_of_a_library_fit_and_run(
    library: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (section,) = [each for each in SECTIONS if each.startswith(f'\nDialect `"{library.DIALECT}"`')]
    codes = blocks_of(section)
    assert list(mismatches(codes)) == []
    monkeypatch.chdir(tmp_path)
    variables = {**scene(), library.SHIPPED: library.base()}
    for code in codes:
        run(code, variables)
