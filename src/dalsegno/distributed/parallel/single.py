"""One process, one model."""

from __future__ import annotations

from .base import Parallel


class Single(Parallel):
    """The unchanged model."""
