"""Reading logs afterwards: runs, their metrics and their legs, whatever program wrote them. No torch is imported."""

from __future__ import annotations

from .compare import Comparison, compare_series
from .detect import Detection, DetectorSettings, Firing, detect_divergence
from .diff import FieldDifference, RecordDifference, diff_records
from .folder import RunFolder, open_log, open_logs
from .heatmap import matching, plot_heatmap
from .log import TrainingLog
from .plot import plot_logs, sketch_logs
from .rewound import Restart, Tail
from .series import ParameterSeries, Series
from .smooth import smooth
from .spikes import Spike, find_spikes
from .sweep import Candidate, sweep_settings
from .view import View

__all__ = [
    "Candidate",
    "Comparison",
    "Detection",
    "DetectorSettings",
    "FieldDifference",
    "Firing",
    "ParameterSeries",
    "RecordDifference",
    "Restart",
    "RunFolder",
    "Series",
    "Spike",
    "Tail",
    "TrainingLog",
    "View",
    "compare_series",
    "detect_divergence",
    "diff_records",
    "find_spikes",
    "matching",
    "open_log",
    "open_logs",
    "plot_heatmap",
    "plot_logs",
    "sketch_logs",
    "smooth",
    "sweep_settings",
]
