"""merge_specs: a user's specifications of columns, metrics or curves, merged over the default ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Spec = dict[str, Any]


def merge_specs(defaults: Mapping[str, Mapping[str, Any]], given: Mapping[str, Spec | None]) -> dict[str, Spec]:
    """Merge ``given`` over ``defaults``, field by field; None removes a default, and new names come last."""
    merged = {name: dict(spec) for name, spec in defaults.items()}
    for name, spec in given.items():
        if spec is None:
            merged.pop(name, None)
        else:
            merged.setdefault(name, {}).update(spec)
    return merged
