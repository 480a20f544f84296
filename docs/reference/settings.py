"""Writes the table of settings from TrainingArguments: ``python docs/reference/settings.py``. A test compares them."""

from __future__ import annotations

import sys
from pathlib import Path

from dalsegno.args.training_arguments import described_settings

sys.path.insert(0, str(Path(__file__).parents[1]))

from written import page_with, write


def table() -> str:
    """Return name, default and meaning of every setting, in the order of the class."""
    rows = []
    for name, default, meaning in described_settings():
        value = "required" if default is None else f"`{default}`"
        text = meaning.replace("``", "`").replace("|", r"\|")
        rows.append(f"| `{name}` | {value} | {text} |")
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows]) + "\n"


def pages() -> dict[Path, str]:
    """Return the page with the current table."""
    return page_with(table(), __file__)


if __name__ == "__main__":
    write(pages())
