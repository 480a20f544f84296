"""The built-in callbacks.

Each is imported on first use: a run that uses ten of them does not wait for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .check_loss import CheckLoss
    from .compute_budget import ComputeBudget
    from .compute_norm import ComputeNorm
    from .count_params import CountParams
    from .default_metrics import DefaultMetrics
    from .defaults import default_callbacks as default_callbacks
    from .defaults import reporting_callbacks as reporting_callbacks
    from .diloco import DiLoCoCallback
    from .divergence_detector import DivergenceDetector
    from .dump_activations import DumpActivations
    from .duration_profiler import DurationProfiler
    from .early_stopping import EarlyStopping
    from .ema import EMA
    from .expert_load_balance import ExpertLoadBalance
    from .flop_utilization import FlopUtilization
    from .garbage_collection import GarbageCollection
    from .grad_histogram import GradHistogram
    from .grad_norm_logger import GradNormLogger
    from .gradient_noise_scale import GradientNoiseScale
    from .hang_watchdog import HangWatchdog
    from .info_callback import InfoCallback
    from .json_logger import JsonLogger
    from .learning_dynamics import LearningDynamics
    from .log_input_summaries import LogInputSummaries
    from .log_optimizer_param_group import LogOptimizerParamGroup
    from .memory_monitor import MemoryMonitor
    from .model_eval_metrics import ModelEvalMetrics
    from .model_merge import ModelMerge
    from .nan_checker import NaNChecker
    from .notify import Notify
    from .optuna_pruning import OptunaPruning as OptunaPruning
    from .optuna_pruning import resume_killed_trials as resume_killed_trials
    from .parameter_norm_logger import ParameterNormLogger
    from .peak_memory import PeakMemory
    from .profiler_callback import ProfilerCallback
    from .progress_callback import ProgressCallback
    from .rate_profiler import RateProfiler
    from .resumable_summary_writer import ResumableSummaryWriter
    from .samples_streamed_info import SamplesStreamedInfo
    from .scale_loss import ScaleLoss
    from .scoped_flags import ScopedFlags
    from .skip_samples import SkipSamples
    from .slow_rank_detector import SlowRankDetector
    from .stability_monitor import StabilityMonitor
    from .tb_logger import TBLogger
    from .textgen_callback import TextgenCallback
    from .trace_malloc import TraceMalloc
    from .trackers.comet_logger import CometLogger
    from .trackers.mlflow_logger import MLflowLogger
    from .trackers.trackio_logger import TrackioLogger
    from .trackers.wandb_logger import WandbLogger
    from .trainer_control import TrainerControlCallback
    from .weight_norm_logger import WeightNormLogger

_HOMES = {
    "check_loss": ("CheckLoss",),
    "compute_budget": ("ComputeBudget",),
    "compute_norm": ("ComputeNorm",),
    "count_params": ("CountParams",),
    "default_metrics": ("DefaultMetrics",),
    "defaults": (
        "default_callbacks",
        "reporting_callbacks",
    ),
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
    "optuna_pruning": (
        "OptunaPruning",
        "resume_killed_trials",
    ),
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
    "trackers.comet_logger": ("CometLogger",),
    "trackers.mlflow_logger": ("MLflowLogger",),
    "trackers.trackio_logger": ("TrackioLogger",),
    "trackers.wandb_logger": ("WandbLogger",),
    "trainer_control": ("TrainerControlCallback",),
    "weight_norm_logger": ("WeightNormLogger",),
}

__all__ = [
    "EMA",
    "CheckLoss",
    "CometLogger",
    "ComputeBudget",
    "ComputeNorm",
    "CountParams",
    "DefaultMetrics",
    "DiLoCoCallback",
    "DivergenceDetector",
    "DumpActivations",
    "DurationProfiler",
    "EarlyStopping",
    "ExpertLoadBalance",
    "FlopUtilization",
    "GarbageCollection",
    "GradHistogram",
    "GradNormLogger",
    "GradientNoiseScale",
    "HangWatchdog",
    "InfoCallback",
    "JsonLogger",
    "LearningDynamics",
    "LogInputSummaries",
    "LogOptimizerParamGroup",
    "MLflowLogger",
    "MemoryMonitor",
    "ModelEvalMetrics",
    "ModelMerge",
    "NaNChecker",
    "Notify",
    "OptunaPruning",
    "ParameterNormLogger",
    "PeakMemory",
    "ProfilerCallback",
    "ProgressCallback",
    "RateProfiler",
    "ResumableSummaryWriter",
    "SamplesStreamedInfo",
    "ScaleLoss",
    "ScopedFlags",
    "SkipSamples",
    "SlowRankDetector",
    "StabilityMonitor",
    "TBLogger",
    "TextgenCallback",
    "TraceMalloc",
    "TrackioLogger",
    "TrainerControlCallback",
    "WandbLogger",
    "WeightNormLogger",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
