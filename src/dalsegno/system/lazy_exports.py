"""Lazy exports of a package: importing the package does not import the modules behind its names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping


def lazy_exports(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package (PEP 562).

    Args:
        package: its ``__name__``.
        homes: maps its modules to the names that they define.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f".{home_of[name]}", package), name)
        setattr(sys.modules[package], name, found)
        return found

    return find, lambda: sorted(home_of)
