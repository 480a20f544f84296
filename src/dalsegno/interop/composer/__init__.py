"""Composer: in ``bridge``, dalsegno's callbacks in its Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .bridge import Bridge

__all__ = ["Bridge"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, {"bridge": ("Bridge",)})
