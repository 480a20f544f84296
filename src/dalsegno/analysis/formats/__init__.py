"""The formats of logs, one file each: how a file becomes records."""

from __future__ import annotations

from .naming import BOOKKEEPING, HEADER
from .source import Skipped, Source

__all__ = ["BOOKKEEPING", "HEADER", "Skipped", "Source"]
