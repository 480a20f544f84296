"""Docstrings in Google's style, as text: the description, its first sentence, and each argument's description."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from docstring_parser import ParseError
from docstring_parser.common import DocstringParam
from docstring_parser.google import parse

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Raises|Returns|Yields):$", re.MULTILINE)
_NAME = re.compile(r"`[^`]+`")
_ROLE = re.compile(r":\w+:(?=`)")


def prose(made: Callable[..., Any]) -> str:
    """The docstring up to its first section, without reStructuredText roles."""
    # not the parser's description: it unindents the first line of an example that follows the first sentence
    return _plain(_SECTION.split(inspect.getdoc(made) or "", maxsplit=1)[0].strip())


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
    """Argument → description, from the ``Args:`` of a function, or of a class and its constructor.

    The class's own description of an argument replaces one of its constructor, which may be inherited.
    """
    sources = [made.__init__, made] if isinstance(made, type) else [made]  # type: ignore[misc]
    params = [param for source in sources for param in _params(inspect.getdoc(source) or "")]
    return {param.arg_name.lstrip("*"): _plain(" ".join((param.description or "").split())) for param in params}


def _params(docstring: str) -> list[DocstringParam]:
    try:
        return parse(docstring).params
    except ParseError:  # another style
        return []


def _plain(text: str) -> str:
    return _ROLE.sub("", text).replace("``", "`")
