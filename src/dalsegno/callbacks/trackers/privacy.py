"""Privacy: removes secrets from what is sent to a tracker and from messages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SECRET_NAME = re.compile(r"(api_?key|token|secret|password|passwd|credential)s?$", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)[^/\s@]+@")
_SHORTEST = 6
"""Shorter values of environment variables are not searched for: they occur by chance."""


def without_secrets(text: str) -> str:
    """Hide user and password in URLs, and the values of environment variables that are named like secrets."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST:
            text = text.replace(value, HIDDEN)
    return _USER_INFO.sub(f"{HIDDEN}@", text)


def public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the values hidden that are secrets, by their names or by :func:`without_secrets`."""
    return {name: HIDDEN if _is_secret(name, value) else _public(value) for name, value in settings.items()}


def _is_secret(name: object, value: Any) -> bool:
    return isinstance(value, str) and bool(value) and bool(_SECRET_NAME.search(str(name)))


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return public(value)
    if isinstance(value, (list, tuple)):
        return [_public(each) for each in value]
    return without_secrets(value) if isinstance(value, str) else value
