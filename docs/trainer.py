"""Writes the table of settings in docs/trainer.md from TrainingArguments: ``python docs/trainer.py``. A test compares
them."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from dalsegno.args import training_arguments

PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- written by docs/trainer.py -->\n", "<!-- end -->\n"


def table() -> str:
    """Return name, default and meaning of every setting, in the order of the class."""
    tree = ast.parse(inspect.getsource(training_arguments))
    (settings,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"]
    rows = []
    for field, text in zip(settings.body, settings.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            default = "required" if field.value is None else f"`{ast.unparse(field.value)}`"
            meaning = " ".join(str(text.value.value).split()).replace("``", "`")
            rows.append(f"| `{ast.unparse(field.target)}` | {default} | {meaning} |")
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows]) + "\n"


def page() -> str:
    """Return the page with the current table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(page())
