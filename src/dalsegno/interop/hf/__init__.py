"""Hugging Face: its callbacks, and Forgather's, in dalsegno's Trainer; in ``bridge``, dalsegno's in its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.imports import lazy_exports

from .dialect import HuggingFace, TrainerCallback

if TYPE_CHECKING:
    from .bridge import Bridge
else:
    __getattr__, __dir__ = lazy_exports(__name__)  # transformers takes seconds to import

__all__ = ["DIALECT", "Bridge", "HuggingFace", "TrainerCallback"]

DIALECT = HuggingFace
