"""dalsegno: a PyTorch training loop and callbacks whose state survives being killed.

Names are found when they are first used: importing dalsegno imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import handed_out

if TYPE_CHECKING:
    from .analysis import DetectorSettings as DetectorSettings
    from .analysis import Life as Life
    from .analysis import MetricSummary as MetricSummary
    from .analysis import ParameterSeries as ParameterSeries
    from .analysis import RunFolder as RunFolder
    from .analysis import Series as Series
    from .analysis import Summary as Summary
    from .analysis import TrainingLog as TrainingLog
    from .analysis import View as View
    from .analysis import compare_series as compare_series
    from .analysis import detect_divergence as detect_divergence
    from .analysis import diff_records as diff_records
    from .analysis import export_log as export_log
    from .analysis import find_spikes as find_spikes
    from .analysis import open_log as open_log
    from .analysis import open_logs as open_logs
    from .analysis import plot_heatmap as plot_heatmap
    from .analysis import plot_logs as plot_logs
    from .analysis import sweep_settings as sweep_settings
    from .analysis import write_report as write_report
    from .args import TrainingArguments as TrainingArguments
    from .background import Background as Background
    from .callback import Callback as Callback
    from .callback import global_callbacks as global_callbacks
    from .checkpoint import export_model as export_model
    from .component import Stateful as Stateful
    from .config import RunConfig as RunConfig
    from .config import load_callbacks as load_callbacks
    from .contexts import AfterForwardContext as AfterForwardContext
    from .contexts import BackwardContext as BackwardContext
    from .contexts import BeforeForwardContext as BeforeForwardContext
    from .contexts import BeforeLoadContext as BeforeLoadContext
    from .contexts import BeforeSaveContext as BeforeSaveContext
    from .contexts import EpochContext as EpochContext
    from .contexts import EvaluateBeginContext as EvaluateBeginContext
    from .contexts import EvaluateContext as EvaluateContext
    from .contexts import EvaluateEndContext as EvaluateEndContext
    from .contexts import ExceptionContext as ExceptionContext
    from .contexts import LoadContext as LoadContext
    from .contexts import LogContext as LogContext
    from .contexts import LossContext as LossContext
    from .contexts import MetricsContext as MetricsContext
    from .contexts import MicrobatchBeginContext as MicrobatchBeginContext
    from .contexts import MicrobatchEndContext as MicrobatchEndContext
    from .contexts import PredictionStepContext as PredictionStepContext
    from .contexts import PreOptimizerStepContext as PreOptimizerStepContext
    from .contexts import RollbackContext as RollbackContext
    from .contexts import SaveContext as SaveContext
    from .contexts import SchedulerContext as SchedulerContext
    from .contexts import StepDoneContext as StepDoneContext
    from .contexts import StepEndContext as StepEndContext
    from .contexts import StepSkippedContext as StepSkippedContext
    from .contexts import TrainBeginContext as TrainBeginContext
    from .contexts import TrainEndContext as TrainEndContext
    from .dialects.hf.base import TrainerCallback as TrainerCallback
    from .dialects.instructlab.functions import functions as functions
    from .errors import CannotSave as CannotSave
    from .errors import ConfigurationError as ConfigurationError
    from .errors import DalsegnoError as DalsegnoError
    from .errors import DamagedCheckpoint as DamagedCheckpoint
    from .errors import DuplicateKey as DuplicateKey
    from .errors import EmptyDataset as EmptyDataset
    from .errors import EventNotFired as EventNotFired
    from .errors import Locked as Locked
    from .errors import NotFound as NotFound
    from .errors import RankFailed as RankFailed
    from .errors import SaveFailed as SaveFailed
    from .errors import StateMismatch as StateMismatch
    from .errors import UnknownDialect as UnknownDialect
    from .errors import UnknownName as UnknownName
    from .events import Event as Event
    from .foreign import adapt as adapt
    from .listening import on as on
    from .own_loop import Run as Run
    from .registration import GlobalHandle as GlobalHandle
    from .registration import register_global_callback as register_global_callback
    from .result import TrainResult as TrainResult
    from .retention import Best as Best
    from .retention import EveryNth as EveryNth
    from .retention import Latest as Latest
    from .schedule import AtEnd as AtEnd
    from .schedule import AtSteps as AtSteps
    from .schedule import Every as Every
    from .schedule import OnBest as OnBest
    from .state import TrainerControl as TrainerControl
    from .state import TrainerState as TrainerState
    from .trainer import Trainer as Trainer

_HOMES = {
    "analysis": (
        "DetectorSettings",
        "Life",
        "MetricSummary",
        "ParameterSeries",
        "RunFolder",
        "Series",
        "Summary",
        "TrainingLog",
        "View",
        "compare_series",
        "detect_divergence",
        "diff_records",
        "export_log",
        "find_spikes",
        "open_log",
        "open_logs",
        "plot_heatmap",
        "plot_logs",
        "sweep_settings",
        "write_report",
    ),
    "args": ("TrainingArguments",),
    "background": ("Background",),
    "callback": (
        "Callback",
        "global_callbacks",
    ),
    "checkpoint": ("export_model",),
    "component": ("Stateful",),
    "config": (
        "RunConfig",
        "load_callbacks",
    ),
    "contexts": (
        "AfterForwardContext",
        "BackwardContext",
        "BeforeForwardContext",
        "BeforeLoadContext",
        "BeforeSaveContext",
        "EpochContext",
        "EvaluateBeginContext",
        "EvaluateContext",
        "EvaluateEndContext",
        "ExceptionContext",
        "LoadContext",
        "LogContext",
        "LossContext",
        "MetricsContext",
        "MicrobatchBeginContext",
        "MicrobatchEndContext",
        "PreOptimizerStepContext",
        "PredictionStepContext",
        "RollbackContext",
        "SaveContext",
        "SchedulerContext",
        "StepDoneContext",
        "StepEndContext",
        "StepSkippedContext",
        "TrainBeginContext",
        "TrainEndContext",
    ),
    "dialects.hf.base": ("TrainerCallback",),
    "dialects.instructlab.functions": ("functions",),
    "errors": (
        "CannotSave",
        "ConfigurationError",
        "DalsegnoError",
        "DamagedCheckpoint",
        "DuplicateKey",
        "EmptyDataset",
        "EventNotFired",
        "Locked",
        "NotFound",
        "RankFailed",
        "SaveFailed",
        "StateMismatch",
        "UnknownDialect",
        "UnknownName",
    ),
    "events": ("Event",),
    "foreign": ("adapt",),
    "listening": ("on",),
    "registration": (
        "GlobalHandle",
        "register_global_callback",
    ),
    "own_loop": ("Run",),
    "result": ("TrainResult",),
    "retention": (
        "Best",
        "EveryNth",
        "Latest",
    ),
    "schedule": (
        "AtEnd",
        "AtSteps",
        "Every",
        "OnBest",
    ),
    "state": (
        "TrainerControl",
        "TrainerState",
    ),
    "trainer": ("Trainer",),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = handed_out(__name__, _HOMES)
