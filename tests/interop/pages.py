"""docs/bridges.md: its examples, and the tables in it that follow from the code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import dalsegno as ds
from support.builtins import NAMES, build

PAGE = Path(__file__).parents[2] / "docs" / "bridges.md"


def section(library: str) -> str:
    """What the page says of one library."""
    (text,) = re.findall(rf"^## {library}\n(.*?)(?=^## |\Z)", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return str(text)


def examples(library: str) -> list[str]:
    """The examples of one library, which continue one another."""
    return re.findall(r"```python\n(.*?)```", section(library), flags=re.DOTALL)


def refused_builtins(build_bridge: Callable[[list[object]], object]) -> list[str]:
    """The built-in callbacks that a Bridge refuses."""
    refused = []
    for name in NAMES:
        try:
            build_bridge([build(name)])
        except ds.EventNotFired:
            refused.append(name)
    return refused


def assert_rows(library: str, rows: Mapping[str, list[str]]) -> None:
    """Each row of a table of ``library`` lists exactly these names."""
    for title, names in rows.items():
        row = f"| {title} | {', '.join(f'`{name}`' for name in names)} |"
        assert row in section(library), f"docs/bridges.md lacks: {row}"
