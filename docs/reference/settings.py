"""Writes the table of settings from TrainingArguments: ``python docs/reference/settings.py``. A test compares them."""

from __future__ import annotations

from pathlib import Path

from dalsegno.args.training_arguments import described_settings

PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- written by docs/reference/settings.py -->\n", "<!-- end -->\n"


def table() -> str:
    """Return name, default and meaning of every setting, in the order of the class."""
    rows = [
        f"| `{name}` | {'required' if default is None else f'`{default}`'} | {meaning.replace('``', '`')} |"
        for name, default, meaning in described_settings()
    ]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows]) + "\n"


def pages() -> dict[Path, str]:
    """Return the page with the current table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return {PAGE: before + BEGIN + table() + END + after}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
