"""Annotations of a function, resolved one by one, so that one that only a type checker can resolve affects no other."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Name → annotation; annotations that cannot be resolved are left out."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    names = getattr(function, "__globals__", vars(module) if module else {})
    resolved: dict[str, Any] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        alone = SimpleNamespace(__annotations__={name: annotation})
        try:
            resolved |= typing.get_type_hints(alone, names, include_extras=True)
        except (NameError, AttributeError, TypeError, SyntaxError):
            continue
    return resolved
