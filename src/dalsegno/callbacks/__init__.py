"""The built-in callbacks."""

from __future__ import annotations

from collections.abc import Container, Iterable

from dalsegno.distributed import collectives
from dalsegno.events.callback import Callback

from .check_loss import CheckLoss
from .compute_budget import ComputeBudget
from .compute_norm import ComputeNorm
from .count_params import CountParams
from .default_metrics import DefaultMetrics
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
from .optuna_pruning import OptunaPruning
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


def default_callbacks() -> list[Callback]:
    """Those that listen to every run unless they are removed; one of the user's own with the same key replaces one."""
    together = (
        [GarbageCollection()] if collectives.world_size() > 1 else []
    )  # on a single rank, no other rank waits for the collector
    return [DefaultMetrics(), ProgressCallback(), InfoCallback(), *together]


_TRACKERS: dict[str, type[Callback]] = {
    "tensorboard": TBLogger,
    "wandb": WandbLogger,
    "mlflow": MLflowLogger,
    "comet_ml": CometLogger,
    "trackio": TrackioLogger,
}


def reporting_callbacks(report_to: Iterable[str], without: Container[str] = ()) -> list[Callback]:
    """Return the loggers of the trackers in ``TrainingArguments(report_to=…)``, without those with these keys.

    Raises:
        ConfigurationError: if a tracker's library is not installed.
    """
    kinds = [_TRACKERS[name] for name in report_to]
    return [kind() for kind in kinds if kind.__name__ not in without]


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
