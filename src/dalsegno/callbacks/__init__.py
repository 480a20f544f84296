"""The built-in callbacks.

Each is imported on first use: a run that uses ten of them does not wait for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .check_loss import CheckLoss as CheckLoss
    from .compute_budget import ComputeBudget as ComputeBudget
    from .compute_norm import ComputeNorm as ComputeNorm
    from .count_params import CountParams as CountParams
    from .default_metrics import DefaultMetrics as DefaultMetrics
    from .defaults import default_callbacks as default_callbacks
    from .defaults import reporting_callbacks as reporting_callbacks
    from .diloco import DiLoCoCallback as DiLoCoCallback
    from .divergence_detector import DivergenceDetector as DivergenceDetector
    from .dump_activations import DumpActivations as DumpActivations
    from .duration_profiler import DurationProfiler as DurationProfiler
    from .early_stopping import EarlyStopping as EarlyStopping
    from .ema import EMA as EMA
    from .expert_load_balance import ExpertLoadBalance as ExpertLoadBalance
    from .flop_utilization import FlopUtilization as FlopUtilization
    from .garbage_collection import GarbageCollection as GarbageCollection
    from .grad_histogram import GradHistogram as GradHistogram
    from .grad_norm_logger import GradNormLogger as GradNormLogger
    from .gradient_noise_scale import GradientNoiseScale as GradientNoiseScale
    from .hang_watchdog import HangWatchdog as HangWatchdog
    from .info_callback import InfoCallback as InfoCallback
    from .json_logger import JsonLogger as JsonLogger
    from .learning_dynamics import LearningDynamics as LearningDynamics
    from .log_input_summaries import LogInputSummaries as LogInputSummaries
    from .log_optimizer_param_group import LogOptimizerParamGroup as LogOptimizerParamGroup
    from .memory_monitor import MemoryMonitor as MemoryMonitor
    from .model_eval_metrics import ModelEvalMetrics as ModelEvalMetrics
    from .model_merge import ModelMerge as ModelMerge
    from .nan_checker import NaNChecker as NaNChecker
    from .notify import Notify as Notify
    from .optuna_pruning import OptunaPruning as OptunaPruning
    from .optuna_pruning import resume_killed_trials as resume_killed_trials
    from .parameter_norm_logger import ParameterNormLogger as ParameterNormLogger
    from .peak_memory import PeakMemory as PeakMemory
    from .profiler_callback import ProfilerCallback as ProfilerCallback
    from .progress_callback import ProgressCallback as ProgressCallback
    from .rate_profiler import RateProfiler as RateProfiler
    from .resumable_summary_writer import ResumableSummaryWriter as ResumableSummaryWriter
    from .samples_streamed_info import SamplesStreamedInfo as SamplesStreamedInfo
    from .scale_loss import ScaleLoss as ScaleLoss
    from .scoped_flags import ScopedFlags as ScopedFlags
    from .skip_samples import SkipSamples as SkipSamples
    from .slow_rank_detector import SlowRankDetector as SlowRankDetector
    from .stability_monitor import StabilityMonitor as StabilityMonitor
    from .tb_logger import TBLogger as TBLogger
    from .textgen_callback import TextgenCallback as TextgenCallback
    from .trace_malloc import TraceMalloc as TraceMalloc
    from .trackers.mlflow_logger import MLflowLogger as MLflowLogger
    from .trackers.wandb_logger import WandbLogger as WandbLogger
    from .trainer_control import TrainerControlCallback as TrainerControlCallback
    from .weight_norm_logger import WeightNormLogger as WeightNormLogger

_HOMES = {
    "check_loss": ("CheckLoss",),
    "compute_budget": ("ComputeBudget",),
    "compute_norm": ("ComputeNorm",),
    "count_params": ("CountParams",),
    "default_metrics": ("DefaultMetrics",),
    "defaults": ("default_callbacks", "reporting_callbacks"),
    "diloco": ("DiLoCoCallback",),
    "divergence_detector": ("DivergenceDetector",),
    "dump_activations": ("DumpActivations",),
    "duration_profiler": ("DurationProfiler",),
    "early_stopping": ("EarlyStopping",),
    "ema": ("EMA",),
    "expert_load_balance": ("ExpertLoadBalance",),
    "flop_utilization": ("FlopUtilization",),
    "garbage_collection": ("GarbageCollection",),
    "grad_histogram": ("GradHistogram",),
    "grad_norm_logger": ("GradNormLogger",),
    "gradient_noise_scale": ("GradientNoiseScale",),
    "hang_watchdog": ("HangWatchdog",),
    "info_callback": ("InfoCallback",),
    "json_logger": ("JsonLogger",),
    "learning_dynamics": ("LearningDynamics",),
    "log_input_summaries": ("LogInputSummaries",),
    "log_optimizer_param_group": ("LogOptimizerParamGroup",),
    "memory_monitor": ("MemoryMonitor",),
    "model_eval_metrics": ("ModelEvalMetrics",),
    "model_merge": ("ModelMerge",),
    "nan_checker": ("NaNChecker",),
    "notify": ("Notify",),
    "optuna_pruning": ("OptunaPruning", "resume_killed_trials"),
    "parameter_norm_logger": ("ParameterNormLogger",),
    "peak_memory": ("PeakMemory",),
    "profiler_callback": ("ProfilerCallback",),
    "progress_callback": ("ProgressCallback",),
    "rate_profiler": ("RateProfiler",),
    "resumable_summary_writer": ("ResumableSummaryWriter",),
    "samples_streamed_info": ("SamplesStreamedInfo",),
    "scale_loss": ("ScaleLoss",),
    "scoped_flags": ("ScopedFlags",),
    "skip_samples": ("SkipSamples",),
    "slow_rank_detector": ("SlowRankDetector",),
    "stability_monitor": ("StabilityMonitor",),
    "tb_logger": ("TBLogger",),
    "textgen_callback": ("TextgenCallback",),
    "trace_malloc": ("TraceMalloc",),
    "trackers.mlflow_logger": ("MLflowLogger",),
    "trackers.wandb_logger": ("WandbLogger",),
    "trainer_control": ("TrainerControlCallback",),
    "weight_norm_logger": ("WeightNormLogger",),
}

__all__ = sorted(name for names in _HOMES.values() for name in names if name[0].isupper())  # the classes

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
