"""Writes the table of docs/reference/data.md from the results of the matrix (``python docs/reference/data.py``).

A test compares the two, and others run the cells again: see tests/durability/matrix.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from written import page_with, write

from durability import kinds
from durability.matrix import shown

WORDS = {"exact": "exact", "said": "warned", "refused": "refused"}
UNTRIED = "–"

HOW = {
    kinds.PLACE: "position",
    kinds.ITS_STATE: "its state",
    kinds.AGAIN: "read again",
    kinds.AGAIN_TOO: "read again, generators",
    kinds.OWN: "position, generators",
    kinds.LOADERS: "loader's state, or read again",
    kinds.NOT_SAVED: "cannot be saved",
    "its own state, per rank": "loader's state",
    "the process's generators are saved; worker processes' are seeded for each micro-batch from its position": (
        "position, generators"
    ),
    "a number from (seed, epoch, index) for each sample": "position",
}
"""Short words for how each kind resumes; the page explains each once, above the table."""


def table() -> str:
    """Return the result of each kind of data, in the order of the matrix.

    Raises:
        KeyError: for a cell that differed without a warning: that is a bug, not a result to publish.
    """
    found = shown()
    rows = ["| what you have | 1 rank | 2 ranks | worker processes | how | may change |", "|---|---|---|---|---|---|"]
    for name, kind in kinds.KINDS.items():
        cells = [f"{name} | {cell}" for cell in ("0 workers | 1 ranks", "0 workers | 2 ranks", "2 workers | 1 ranks")]
        verdicts = [WORDS[found[cell]] if cell in found else UNTRIED for cell in cells]
        rows.append(f"| {kind.what} | {' | '.join(verdicts)} | {HOW[kind.how]} | {kind.may_change} |")
    return "\n".join(rows) + "\n"


def pages() -> dict[Path, str]:
    """Return the page with the current table."""
    return page_with(table(), __file__)


if __name__ == "__main__":
    write(pages())
