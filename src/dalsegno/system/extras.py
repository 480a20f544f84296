"""How to get what only some people need: the optional dependencies of pyproject.toml."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """The commands that install ``extra``, for the end of a message."""
    return f"in a clone of dalsegno, pip install -e '.[{extra}]'; from an index, pip install 'dalsegno[{extra}]'"
