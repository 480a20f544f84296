"""Log analysis: read the runs, metrics and legs in the logs of any program. Does not import torch.

Names are imported on first use, so that a summary of a short log does not wait for the plotting modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.imports import lazy_exports

if TYPE_CHECKING:
    from .comparison import Comparison as Comparison
    from .comparison import FieldDifference as FieldDifference
    from .comparison import RecordDifference as RecordDifference
    from .comparison import compare_series as compare_series
    from .comparison import diff_records as diff_records
    from .divergence import DetectorSettings as DetectorSettings
    from .export import export_log as export_log
    from .folder import RunFolder as RunFolder
    from .folder import open_log as open_log
    from .folder import open_logs as open_logs
    from .lineage import Intervention as Intervention
    from .lineage import LegSummary as LegSummary
    from .lineage import Restart as Restart
    from .lineage import Tail as Tail
    from .log import TrainingLog as TrainingLog
    from .plotting import View as View
    from .plotting.plot import matching as matching
    from .plotting.plot import plot_heatmap as plot_heatmap
    from .plotting.plot import plot_logs as plot_logs
    from .plotting.plot import sketch_logs as sketch_logs
    from .replay import Candidate as Candidate
    from .replay import Detection as Detection
    from .replay import Firing as Firing
    from .replay import detect_divergence as detect_divergence
    from .replay import sweep_settings as sweep_settings
    from .report import write_report as write_report
    from .series import ParameterSeries as ParameterSeries
    from .series import Series as Series
    from .series import smooth as smooth
    from .spikes import Spike as Spike
    from .spikes import find_spikes as find_spikes
    from .summary import MetricSummary as MetricSummary
    from .summary import Summary as Summary
else:
    __getattr__, __dir__ = lazy_exports(__name__)
