"""Composer: its callbacks in dalsegno's Trainer; in ``bridge``, dalsegno's in its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.lazy_exports import lazy_exports

from .base import Callback, Event
from .dialect import Composer
from .time import Time

if TYPE_CHECKING:
    from .bridge import Bridge

__all__ = ["DIALECT", "Bridge", "Callback", "Composer", "Event", "Time"]

DIALECT = Composer

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, {"bridge": ("Bridge",)})
