"""Writes the pages of docs/reference/python: ``python docs/reference/python.py``. A test compares them.

A page begins with a table of its names, each with the first sentence of its docstring; the site fills in signatures
and whole docstrings. Packages with lazy exports are listed name by name, because their names are defined elsewhere.
Contexts are described by the events that pass them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import dalsegno
from dalsegno import analysis, callbacks, errors, testing
from dalsegno.events import contexts
from dalsegno.events.table import Event
from dalsegno.system.imports import homes_of

FOLDER = Path(__file__).with_suffix("")

TITLES = {
    "dalsegno": (
        "dalsegno",
        "The names of `import dalsegno as ds`; [reading logs](analysis.md), [errors](errors.md) have their own pages.",
    ),
    "callbacks": (
        "Built-in callbacks",
        "The built-in callbacks, for `callbacks=[…]`. [Callbacks](../callbacks/index.md) states the purpose of each.",
    ),
    "analysis": (
        "Reading logs from Python",
        "`dalsegno.analysis`: what the commands of [reading logs](../../guides/logs.md) are made of.",
    ),
    "testing": ("Testing", "`dalsegno.testing`: see [testing that your run survives](../../guides/testing.md)."),
    "errors": ("Errors", "Each error is also the builtin that fits, so that either can be caught."),
}
CONTEXT_OPTIONS = """\
    options:
      show_root_heading: false
      show_root_toc_entry: false
      show_attribute_values: false
      heading_level: 3
      show_if_no_docstring: true
      inherited_members: [loss]
      filters: ["!^_", "!^fill$"]"""
"""Of a context: its fields, and the loss that several have."""
PACKAGES = {
    "dalsegno": dalsegno,
    "callbacks": callbacks,
    "analysis": analysis,
    "testing": testing,
    "errors": errors,
}
LAZY = {"dalsegno", "analysis"}


def pages() -> dict[Path, str]:
    """The text of each page."""
    return {FOLDER / f"{name}.md": page(name) for name in TITLES}


def page(name: str) -> str:
    """The text of one page."""
    title, about = TITLES[name]
    package = PACKAGES[name]
    shown = list(_names(package)) if name in LAZY else [f"dalsegno.{name}"]
    listed = [each.rpartition(".")[2] for each in shown] if name in LAZY else sorted(dir(package), key=str.lower)
    return "\n\n".join([f"# {title}", about, _table(package, listed), *map(_entry, shown)]) + "\n"


def _table(package: ModuleType, names: list[str]) -> str:
    """Those that are classes and functions of dalsegno, each with the first sentence about it."""
    rows = ["| | |", "|---|---|"]
    for name in names:
        thing = getattr(package, name)
        text = inspect.getdoc(thing) or ""
        is_ours = (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__module__.startswith("dalsegno.")
        if is_ours and not text.startswith(f"{name}("):  # as a dataclass without a docstring has it
            rows.append(f"| `{name}` | {_sentence(text)} |")
    return "\n".join(rows)


def _sentence(text: str) -> str:
    sentence = " ".join(re.split(r"(?<=[^.]\.)\s|:*\n\n", text, maxsplit=1)[0].split())
    without_roles = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", sentence)
    return without_roles.removesuffix(".").replace("``", "`").replace("|", "\\|") + "."


def _entry(name: str) -> str:
    module, _, own_name = name.rpartition(".")
    if module != contexts.__name__:
        return f"::: {name}"
    passed_to = [f"`{event.handler}`" for event in Event if event.context is getattr(contexts, own_name)]
    about = f"What {', '.join(passed_to)} adds to" if passed_to else "Base class: what several events add to"
    return f"## {own_name}\n\n{about} [the fields of every context](../events.md).\n\n::: {name}\n{CONTEXT_OPTIONS}"


def _names(package: ModuleType) -> Iterator[str]:
    """Where the package's names are defined, in alphabetical order, without those that have a page of their own."""
    own = {name: home for name, home in homes_of(package.__name__).items() if home.rpartition(".")[2] not in TITLES}
    yield from (f"{own[name]}.{name}" for name in sorted(own, key=str.lower))


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
