"""The built-in callbacks.

Each is imported on first use: a run that uses ten of them does not wait for all. Each raises ConfigurationError for an
argument that cannot work, for a library that is not installed, and before the first step of a run in which it cannot do
what it is for; UnknownName for a name that does not exist, with the nearest that does. The message names the argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.imports import lazy_exports

if TYPE_CHECKING:
    from dalsegno.callbacks.averages import EMA as EMA
    from dalsegno.callbacks.averages import ModelMerge as ModelMerge
    from dalsegno.callbacks.control.divergence import NaNChecker as NaNChecker
    from dalsegno.callbacks.control.early_stopping import OptunaPruning as OptunaPruning
    from dalsegno.callbacks.control.early_stopping import resume_killed_trials as resume_killed_trials
    from dalsegno.callbacks.loggers.info_callback import CountParams as CountParams
    from dalsegno.callbacks.loggers.record_entries import ModelEvalMetrics as ModelEvalMetrics
    from dalsegno.callbacks.loggers.tensorboard import ResumableSummaryWriter as ResumableSummaryWriter
    from dalsegno.callbacks.loggers.tensorboard import TBLogger as TBLogger
    from dalsegno.callbacks.loggers.tensorboard import default_tb_scalars as default_tb_scalars
    from dalsegno.callbacks.norms.gradient_loggers import GradHistogram as GradHistogram
    from dalsegno.callbacks.norms.gradient_loggers import GradNormLogger as GradNormLogger
    from dalsegno.callbacks.norms.learning_dynamics import GradientNoiseScale as GradientNoiseScale

    from .control.adjustments import GarbageCollection as GarbageCollection
    from .control.adjustments import ScaleLoss as ScaleLoss
    from .control.adjustments import ScopedFlags as ScopedFlags
    from .control.adjustments import SkipSamples as SkipSamples
    from .control.diloco import DiLoCoCallback as DiLoCoCallback
    from .control.divergence import CheckLoss as CheckLoss
    from .control.divergence import DivergenceDetector as DivergenceDetector
    from .control.early_stopping import EarlyStopping as EarlyStopping
    from .control.trainer_control import TrainerControlCallback as TrainerControlCallback
    from .defaults import default_callbacks as default_callbacks
    from .defaults import reporting_callbacks as reporting_callbacks
    from .loggers.info_callback import InfoCallback as InfoCallback
    from .loggers.json_logger import JsonLogger as JsonLogger
    from .loggers.notify import Notify as Notify
    from .loggers.progress_callback import ProgressCallback as ProgressCallback
    from .loggers.record_entries import LogInputSummaries as LogInputSummaries
    from .loggers.record_entries import LogLosses as LogLosses
    from .loggers.record_entries import LogOptimizerParamGroup as LogOptimizerParamGroup
    from .loggers.record_entries import SamplesStreamedInfo as SamplesStreamedInfo
    from .loggers.textgen_callback import TextgenCallback as TextgenCallback
    from .norms.learning_dynamics import LearningDynamics as LearningDynamics
    from .norms.parameter_norms import ComputeNorm as ComputeNorm
    from .norms.parameter_norms import ParameterNormLogger as ParameterNormLogger
    from .norms.parameter_norms import WeightNormLogger as WeightNormLogger
    from .profiling.durations import DurationProfiler as DurationProfiler
    from .profiling.durations import RateProfiler as RateProfiler
    from .profiling.memory import GPUMonitor as GPUMonitor
    from .profiling.memory import MemoryMonitor as MemoryMonitor
    from .profiling.memory import PeakMemory as PeakMemory
    from .profiling.memory import TraceMalloc as TraceMalloc
    from .profiling.profiler_callback import ProfilerCallback as ProfilerCallback
    from .profiling.speed import ComputeBudget as ComputeBudget
    from .profiling.speed import DefaultMetrics as DefaultMetrics
    from .profiling.speed import FlopUtilization as FlopUtilization
    from .trackers.mlflow_logger import MLflowLogger as MLflowLogger
    from .trackers.wandb_logger import WandbLogger as WandbLogger
    from .watchers.dump_activations import DumpActivations as DumpActivations
    from .watchers.expert_load_balance import ExpertLoadBalance as ExpertLoadBalance
    from .watchers.hang_watchdog import HangWatchdog as HangWatchdog
    from .watchers.slow_rank_detector import SlowRankDetector as SlowRankDetector
    from .watchers.stability_monitor import StabilityMonitor as StabilityMonitor
else:
    __getattr__, __dir__ = lazy_exports(__name__)
    __all__ = [name for name in __dir__() if name[0].isupper()]  # the classes
