"""Reading logs afterwards: runs, their metrics and their legs, whatever program wrote them. No torch is imported."""

from __future__ import annotations

from .compare import Comparison, compare_series
from .detect import Detection, DetectorSettings, Firing, detect_divergence
from .diff import FieldDifference, RecordDifference, diff_records
from .export import export_log
from .folder import RunFolder, open_log, open_logs
from .heatmap import matching, plot_heatmap
from .lineage import Life
from .log import TrainingLog
from .plot import plot_logs, sketch_logs
from .report import write_report
from .rewound import Restart, Tail
from .series import ParameterSeries, Series
from .smooth import smooth
from .spikes import Spike, find_spikes
from .summary import MetricSummary, Summary
from .sweep import Candidate, sweep_settings
from .view import View

__all__ = [
    "Candidate",
    "Comparison",
    "Detection",
    "DetectorSettings",
    "FieldDifference",
    "Firing",
    "Life",
    "MetricSummary",
    "ParameterSeries",
    "RecordDifference",
    "Restart",
    "RunFolder",
    "Series",
    "Spike",
    "Summary",
    "Tail",
    "TrainingLog",
    "View",
    "compare_series",
    "detect_divergence",
    "diff_records",
    "export_log",
    "find_spikes",
    "matching",
    "open_log",
    "open_logs",
    "plot_heatmap",
    "plot_logs",
    "sketch_logs",
    "smooth",
    "sweep_settings",
    "write_report",
]
