"""Writes the tables of the callbacks' arguments into their pages: ``python docs/reference/callbacks.py``. A test
compares them.

Each is made from the class's signature and docstring, and stands where its page has the line that names the class.
``name`` is left out: the overview describes it for all.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from dalsegno import callbacks

sys.path.insert(0, str(Path(__file__).parents[1]))

from written import END, write

FOLDER = Path(__file__).parent
BEGIN = "<!-- arguments of {}: written by docs/reference/callbacks.py -->\n"


def pages() -> dict[Path, str]:
    """Return each page with its current tables."""
    texts = {path: path.read_text(encoding="utf-8") for path in [*FOLDER.glob("callbacks/*.md"), FOLDER / "diloco.md"]}
    for name in callbacks.__all__:
        rows, begin = _rows(getattr(callbacks, name)), BEGIN.format(name)
        path = next((path for path, text in texts.items() if begin in text), None)
        if path is not None:
            before, _, rest = texts[path].partition(begin)
            table = "\n".join(["| argument | default | |", "|---|---|---|", *rows, ""])
            texts[path] = before + begin + table + END + rest.partition(END)[2]
        elif rows:
            raise ValueError(f"no page in docs/reference/callbacks has the line {begin!r}")
    return texts


def _rows(callback: type) -> list[str]:
    _, _, arguments = (inspect.getdoc(callback) or "").partition("\nArgs:\n")
    described = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", arguments.partition("\n\n")[0], re.MULTILINE)
    parameters = inspect.signature(callback).parameters
    return [f"| {_given(parameters[name])} | {_cell(text)} |" for name, text in described if name != "name"]


def _given(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"`**{parameter.name}` |"
    if parameter.default is parameter.empty:
        return f"`{parameter.name}` | required"
    default = repr(parameter.default).replace("'", '"')
    return f"`{parameter.name}` | `{_cell(default)}`"


def _cell(text: str) -> str:
    plain = re.sub(r":\w+:`+~?([\w.]+)`+", r"`\1`", " ".join(text.split())).replace("``", "`")
    return plain.replace("|", "\\|").removesuffix(".")


if __name__ == "__main__":
    write(pages())
