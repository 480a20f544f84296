"""error_context: prefix errors with their location in a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dalsegno.errors import DalsegnoError


@contextmanager
def error_context(location: str) -> Iterator[None]:
    """Prefix the message of a DalsegnoError raised inside: ``run.toml, callbacks[0] (Beat): …``."""
    try:
        yield
    except DalsegnoError as error:
        error.args = (f"{location}: {error}",)
        raise
