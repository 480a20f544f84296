"""Writes the table of its page from the scenarios' recorded results: ``python docs/reference/resume-proof.py``.

A test compares the two, and others try scenarios again: see tests/durability/scenarios.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from written import page_with, write

from durability.scenarios import SCENARIOS
from durability.scenarios.scenario import GROUPS, WAYS, shown

WORDS = {"different": "**not seen**"}


def table() -> str:
    """Return the result of each scenario, by group."""
    found = shown()
    rows = []
    for group in GROUPS:
        rows += ["", f"| {group} | {' | '.join(WAYS)} |", "|---|---|---|"]
        for one in (each for each in SCENARIOS.values() if each.group == group):
            verdicts = (found[one.name][way] for way in WAYS)
            rows.append(f"| {one.what} | {' | '.join(WORDS.get(verdict, verdict) for verdict in verdicts)} |")
    return "\n".join(rows) + "\n\n"


def pages() -> dict[Path, str]:
    """Return the page with the current table."""
    return page_with(table(), __file__)


if __name__ == "__main__":
    write(pages())
