"""Where in a configuration something stands, in front of what is said about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dalsegno.errors import DalsegnoError


@contextmanager
def error_context(place: str) -> Iterator[None]:
    """What dalsegno complains of in here is said with its place: ``run.toml, callbacks[0] (Beat): …``."""
    try:
        yield
    except DalsegnoError as error:
        error.args = (f"{place}: {error}",)
        raise
