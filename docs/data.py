"""Writes the table of docs/data.md from what the matrix has shown: ``python docs/data.py``.

A test holds the two together, and others try the cells again: see tests/durability/matrix.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from durability.kinds import KINDS
from durability.matrix import shown

PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- written by docs/data.py -->\n", "<!-- end -->\n"

WORDS = {"exact": "exact", "said": "not exact, and said", "refused": "refused"}
UNTRIED = "–"


def table() -> str:
    """What became of each kind of data, in the order of the matrix.

    Raises:
        KeyError: for a cell that came out different, and nobody was told: that is no row for a page, but a mistake.
    """
    found = shown()
    rows = ["| what you have | 1 rank | 2 ranks | worker processes | how | may change |", "|---|---|---|---|---|---|"]
    for name, kind in KINDS.items():
        cells = [f"{name} | {cell}" for cell in ("0 workers | 1 ranks", "0 workers | 2 ranks", "2 workers | 1 ranks")]
        verdicts = [WORDS[found[cell]] if cell in found else UNTRIED for cell in cells]
        rows.append(f"| {kind.what} | {' | '.join(verdicts)} | {kind.how} | {kind.may_change} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """The page with the table as it must be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(page())
