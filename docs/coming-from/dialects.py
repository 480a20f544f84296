"""Writes the table of tried classes into its page: ``python docs/coming-from/dialects.py``.

A test compares the two, and others try each class: see tests/interop/tried.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from interop.libraries import TRIED
from interop.tried import Tried

PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- written by docs/coming-from/dialects.py -->\n", "<!-- end -->\n"
CONSTRAINTS = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
VERSIONS = dict(line.split("==") for line in CONSTRAINTS.splitlines() if "==" in line)


def result(tried: Tried) -> str:
    """Return what becomes of the class."""
    if tried.refused:
        return f"refused: {tried.refused}"
    return f"differs: {tried.differs}" if tried.differs else f"held{tried.remark and f'; {tried.remark}'}"


def table() -> str:
    """Return the table, library by library."""
    rows = ["| class | library | result |", "|---|---|---|"]
    for each in TRIED:
        library = f"{each.library} {VERSIONS.get(each.library, '')}".strip()
        rows.append(f"| `{each.name}` | {library} | {result(each)} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """Return the page with the current table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
