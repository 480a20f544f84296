"""The built-in callbacks."""

from __future__ import annotations

from dalsegno.callback import Callback

from .divergence_detector import DivergenceDetector
from .grad_norm_logger import GradNormLogger
from .json_logger import JsonLogger


def default_callbacks() -> list[Callback]:
    """Those that listen to every run unless they are removed."""
    return []


__all__ = ["DivergenceDetector", "GradNormLogger", "JsonLogger"]
