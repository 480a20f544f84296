"""Log formats, one module each: read a file as records."""

from __future__ import annotations

from .naming import BOOKKEEPING, HEADER
from .source import Skipped, Source

__all__ = ["BOOKKEEPING", "HEADER", "Skipped", "Source"]
