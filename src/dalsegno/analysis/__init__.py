"""Reading logs afterwards: runs, their metrics and their legs, whatever program wrote them. No torch is imported."""

from __future__ import annotations

from .folder import RunFolder, open_log, open_logs
from .log import TrainingLog
from .series import ParameterSeries, Series

__all__ = [
    "ParameterSeries",
    "RunFolder",
    "Series",
    "TrainingLog",
    "open_log",
    "open_logs",
]
