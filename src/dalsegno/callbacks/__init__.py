"""The built-in callbacks."""

from __future__ import annotations

from .divergence_detector import DivergenceDetector
from .grad_norm_logger import GradNormLogger
from .json_logger import JsonLogger

__all__ = ["DivergenceDetector", "GradNormLogger", "JsonLogger"]
