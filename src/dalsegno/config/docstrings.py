"""Parse docstrings: the description, and each argument in the ``Args:`` section."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

_ARGUMENTS = re.compile(r"^(Args|Arguments|Parameters):$")
_NAME = re.compile(r"`[^`]+`")
_ENTRY = re.compile(r"^\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")
_ROLE = re.compile(r":\w+:(?=`)")


def prose(made: Callable[..., Any]) -> str:
    """The docstring up to its ``Args:``, without reStructuredText roles."""
    lines = (inspect.getdoc(made) or "").splitlines()
    end = next((number for number, line in enumerate(lines) if _ARGUMENTS.match(line)), len(lines))
    return _plain("\n".join(lines[:end]).strip())


def summary(made: Callable[..., Any]) -> str:
    """The first sentence of :func:`prose`; if it introduces a list, with the names that the list explains."""
    first, _, rest = prose(made).partition("\n\n")
    sentence = re.split(r"(?<=\.)\s", " ".join(first.split()), maxsplit=1)[0]
    if not sentence.endswith(":"):
        return sentence
    listed = re.findall(r"^- ([^:]*):", rest.partition("\n\n")[0], re.MULTILINE)
    named = [name for item in listed for name in _NAME.findall(item)]
    return f"{sentence.rstrip(':')}: {', '.join(named)}." if named else f"{sentence.rstrip(':')}."


def argument_docs(made: Callable[..., Any]) -> dict[str, str]:
    """Argument → description, from the ``Args:`` of a function, or of a class and its constructor."""
    sources = [made, made.__init__] if isinstance(made, type) else [made]  # type: ignore[misc]
    docs: dict[str, str] = {}
    for source in sources:
        docs |= _entries((inspect.getdoc(source) or "").splitlines())
    return docs


def _entries(lines: list[str]) -> dict[str, str]:
    docs: dict[str, str] = {}
    start = next((number for number, line in enumerate(lines) if _ARGUMENTS.match(line)), len(lines))
    depth, name = 0, ""
    for line in lines[start + 1 :]:
        indent = len(line) - len(line.lstrip())
        if indent == 0:
            break
        depth = depth or indent
        entry = _ENTRY.match(line.strip()) if indent == depth else None
        if entry:
            name = entry[1]
            docs[name] = _plain(entry[2])
        elif name:
            docs[name] += f" {_plain(line.strip())}"
    return docs


def _plain(text: str) -> str:
    return _ROLE.sub("", text).replace("``", "`")
