"""Writes the generated tables of the pages beside it: ``python docs/coming-from/libraries.py``. A test compares them.

Settings are those of dalsegno.args.other_names. Classes that were tried are those of tests/interop/tried.py; others try
each.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from dalsegno.args import TrainingArguments
from dalsegno.args.other_names import (
    ACCELERATE,
    CEREBRAS,
    COMMON,
    FORGATHER,
    HUGGING_FACE,
    INSTRUCTLAB,
    KEMPNERFORGE,
    LIGHTNING,
)
from interop.libraries import TRIED
from interop.tried import Tried

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- {}: written by docs/coming-from/libraries.py -->\n", "<!-- end -->\n"
SETTINGS = {
    "hugging-face": HUGGING_FACE,
    "lightning": LIGHTNING,
    "accelerate": ACCELERATE,
    "forgather": FORGATHER,
    "kempnerforge": KEMPNERFORGE,
    "cerebras": CEREBRAS,
    "instructlab": INSTRUCTLAB,
    "index": {name: answer for name, answer in COMMON.items() if name != answer},
}
PAGES_OF_TRIED = {
    "transformers": "hugging-face",
    "trl": "hugging-face",
    "(axolotl)": "hugging-face",
    "pytorch-lightning": "lightning",
    "(kempnerforge)": "kempnerforge",
}
CONSTRAINTS = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
VERSIONS = dict(line.split("==") for line in CONSTRAINTS.splitlines() if "==" in line)


def pages() -> dict[Path, str]:
    """Return each page with its current tables."""
    tables = [(page, "settings", _settings(answers)) for page, answers in SETTINGS.items()]
    for page in dict.fromkeys(PAGES_OF_TRIED.values()):
        tables.append((page, "tried", _tried([each for each in TRIED if PAGES_OF_TRIED[each.library] == page])))
    texts: dict[Path, str] = {}
    for name, kind, table in tables:
        path = FOLDER / f"{name}.md"
        begin = BEGIN.format(kind)
        before, found, rest = texts.get(path, path.read_text(encoding="utf-8")).partition(begin)
        if not found:
            raise ValueError(f"{path} lacks the line {begin!r}")
        texts[path] = before + begin + table + END + rest.partition(END)[2]
    return texts


def _settings(answers: dict[str, str]) -> str:
    names: dict[str, list[str]] = {}
    for name, answer in answers.items():
        names.setdefault(_cell(answer), []).append(f"`{name}`")
    rows = [f"| {', '.join(same)} | {answer} |" for answer, same in names.items()]
    return "\n".join(["| there | here |", "|---|---|", *rows, ""])


def _cell(answer: str) -> str:
    if answer.isidentifier():
        owner = "TrainingArguments" if answer in TrainingArguments.__dataclass_fields__ else "Trainer"
        return f"`{owner}({answer}=…)`"
    return answer.replace("|", "\\|")


def _tried(classes: list[Tried]) -> str:
    libraries = {_library(each) for each in classes}
    if len(libraries) == 1:
        rows = [f"| `{each.name}` | {_result(each)} |" for each in classes]
        return "\n".join([f"| class of {libraries.pop().strip('()')} | result |", "|---|---|", *rows, ""])
    rows = [f"| `{each.name}` | {_library(each)} | {_result(each)} |" for each in classes]
    return "\n".join(["| class | library | result |", "|---|---|---|", *rows, ""])


def _library(tried: Tried) -> str:
    return f"{tried.library} {VERSIONS.get(tried.library, '')}".strip()


def _result(tried: Tried) -> str:
    if tried.refused:
        return f"refused: {tried.refused}"
    return f"differs: {tried.differs}" if tried.differs else f"held{tried.remark and f'; {tried.remark}'}"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
