"""docs/coming-from/dialects.md: the examples in each library's section fit today's names and signatures, and run."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from interop.libraries import EXAMPLES
from support.fragments import blocks_of, mismatches, run, scene

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from" / "dialects.md").read_text(encoding="utf-8")
INTRODUCTION, *SECTIONS = re.split(r"^## .*\n", PAGE, flags=re.MULTILINE)


def test_the_example_of_several_libraries_fits() -> None:
    codes = blocks_of(INTRODUCTION)
    assert codes and list(mismatches(codes)) == []


@pytest.mark.parametrize("library", EXAMPLES.values(), ids=EXAMPLES)
def test_the_examples_of_a_library_fit_and_run(
    library: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (section,) = [each for each in SECTIONS if each.startswith(f'\n`"{library.DIALECT}"`')]
    codes = blocks_of(section)
    assert list(mismatches(codes)) == []
    monkeypatch.chdir(tmp_path)
    variables = {**scene(), library.SHIPPED: library.base()}
    for code in codes:
        run(code, variables)
