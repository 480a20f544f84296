"""Log analysis: read the runs, metrics and legs in the logs of any program. Does not import torch.

Names are imported on first use, so that a summary of a short log does not wait for the plotting modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .diff import FieldDifference as FieldDifference
    from .diff import RecordDifference as RecordDifference
    from .diff import diff_records as diff_records
    from .export import export_log as export_log
    from .folder import RunFolder as RunFolder
    from .folder import open_log as open_log
    from .folder import open_logs as open_logs
    from .lineage import LegSummary as LegSummary
    from .log import TrainingLog as TrainingLog
    from .plotting.heatmap import matching as matching
    from .plotting.heatmap import plot_heatmap as plot_heatmap
    from .plotting.plot import plot_logs as plot_logs
    from .plotting.plot import sketch_logs as sketch_logs
    from .plotting.view import View as View
    from .report import write_report as write_report
    from .rewound import Restart as Restart
    from .rewound import Tail as Tail
    from .series import ParameterSeries as ParameterSeries
    from .series import Series as Series
    from .stats.compare import Comparison as Comparison
    from .stats.compare import compare_series as compare_series
    from .stats.detect import Detection as Detection
    from .stats.detect import DetectorSettings as DetectorSettings
    from .stats.detect import Firing as Firing
    from .stats.detect import detect_divergence as detect_divergence
    from .stats.smooth import smooth as smooth
    from .stats.spikes import Spike as Spike
    from .stats.spikes import find_spikes as find_spikes
    from .stats.sweep import Candidate as Candidate
    from .stats.sweep import sweep_settings as sweep_settings
    from .summary import MetricSummary as MetricSummary
    from .summary import Summary as Summary

_HOMES = {
    "stats.compare": ("Comparison", "compare_series"),
    "stats.detect": ("Detection", "DetectorSettings", "Firing", "detect_divergence"),
    "diff": ("FieldDifference", "RecordDifference", "diff_records"),
    "export": ("export_log",),
    "folder": ("RunFolder", "open_log", "open_logs"),
    "plotting.heatmap": ("matching", "plot_heatmap"),
    "lineage": ("LegSummary",),
    "log": ("TrainingLog",),
    "plotting.plot": ("plot_logs", "sketch_logs"),
    "report": ("write_report",),
    "rewound": ("Restart", "Tail"),
    "series": ("ParameterSeries", "Series"),
    "stats.smooth": ("smooth",),
    "stats.spikes": ("Spike", "find_spikes"),
    "summary": ("MetricSummary", "Summary"),
    "stats.sweep": ("Candidate", "sweep_settings"),
    "plotting.view": ("View",),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
