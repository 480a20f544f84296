"""The built-in callbacks."""

from __future__ import annotations

from dalsegno.callback import Callback

from .compute_norm import ComputeNorm
from .default_metrics import DefaultMetrics
from .divergence_detector import DivergenceDetector
from .grad_norm_logger import GradNormLogger
from .info_callback import InfoCallback
from .json_logger import JsonLogger
from .parameter_norm_logger import ParameterNormLogger
from .progress_callback import ProgressCallback
from .weight_norm_logger import WeightNormLogger


def default_callbacks() -> list[Callback]:
    """Those that listen to every run unless they are removed; one of the user's own with the same key replaces one."""
    return [DefaultMetrics(), ProgressCallback(), InfoCallback()]


__all__ = [
    "ComputeNorm",
    "DefaultMetrics",
    "DivergenceDetector",
    "GradNormLogger",
    "InfoCallback",
    "JsonLogger",
    "ParameterNormLogger",
    "ProgressCallback",
    "WeightNormLogger",
]
