"""dalsegno: a PyTorch training loop and callbacks whose state survives being killed.

Names are found when they are first used: importing dalsegno imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.imports import lazy_exports

if TYPE_CHECKING:
    from .analysis import DetectorSettings as DetectorSettings
    from .analysis import LegSummary as LegSummary
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
    from .checkpoint import export_adapters as export_adapters
    from .checkpoint import export_checkpoint as export_checkpoint
    from .checkpoint import export_model as export_model
    from .checkpoint import import_checkpoint as import_checkpoint
    from .config import RunConfig as RunConfig
    from .config import load_callbacks as load_callbacks
    from .data.mixture import Mixture as Mixture
    from .distributed.layout import Layout as Layout
    from .distributed.modes import DDP as DDP
    from .distributed.modes import FSDP as FSDP
    from .distributed.modes import HSDP as HSDP
    from .distributed.modes import Parallelized as Parallelized
    from .distributed.modes import Pipeline as Pipeline
    from .distributed.modes import TensorParallel as TensorParallel
    from .errors import CannotSave as CannotSave
    from .errors import ConfigurationError as ConfigurationError
    from .errors import DalsegnoError as DalsegnoError
    from .errors import DamagedCheckpoint as DamagedCheckpoint
    from .errors import DuplicateKey as DuplicateKey
    from .errors import EmptyDataset as EmptyDataset
    from .errors import EventNotFired as EventNotFired
    from .errors import LeaseLost as LeaseLost
    from .errors import Locked as Locked
    from .errors import NotFound as NotFound
    from .errors import NotRunning as NotRunning
    from .errors import NotSupported as NotSupported
    from .errors import RankFailed as RankFailed
    from .errors import SaveFailed as SaveFailed
    from .errors import StateMismatch as StateMismatch
    from .errors import UnknownDialect as UnknownDialect
    from .errors import UnknownName as UnknownName
    from .events.adapters import adapt as adapt
    from .events.background import Background as Background
    from .events.callback import Callback as Callback
    from .events.callback import global_callbacks as global_callbacks
    from .events.contexts import AfterForwardContext as AfterForwardContext
    from .events.contexts import BackwardContext as BackwardContext
    from .events.contexts import BeforeForwardContext as BeforeForwardContext
    from .events.contexts import BeforeLoadContext as BeforeLoadContext
    from .events.contexts import BeforeSaveContext as BeforeSaveContext
    from .events.contexts import EpochContext as EpochContext
    from .events.contexts import EvaluateBeginContext as EvaluateBeginContext
    from .events.contexts import EvaluateContext as EvaluateContext
    from .events.contexts import EvaluateEndContext as EvaluateEndContext
    from .events.contexts import ExceptionContext as ExceptionContext
    from .events.contexts import LoadContext as LoadContext
    from .events.contexts import LogContext as LogContext
    from .events.contexts import LossContext as LossContext
    from .events.contexts import MetricsContext as MetricsContext
    from .events.contexts import MicrobatchBeginContext as MicrobatchBeginContext
    from .events.contexts import MicrobatchEndContext as MicrobatchEndContext
    from .events.contexts import PredictionStepContext as PredictionStepContext
    from .events.contexts import PreOptimizerStepContext as PreOptimizerStepContext
    from .events.contexts import RollbackContext as RollbackContext
    from .events.contexts import SaveContext as SaveContext
    from .events.contexts import SchedulerContext as SchedulerContext
    from .events.contexts import StepDoneContext as StepDoneContext
    from .events.contexts import StepEndContext as StepEndContext
    from .events.contexts import StepSkippedContext as StepSkippedContext
    from .events.contexts import TrainBeginContext as TrainBeginContext
    from .events.contexts import TrainEndContext as TrainEndContext
    from .events.function_callback import on as on
    from .events.registration import GlobalHandle as GlobalHandle
    from .events.registration import register_global_callback as register_global_callback
    from .events.table import Event as Event
    from .interop.hf.dialect import TrainerCallback as TrainerCallback
    from .interop.instructlab import functions as functions
    from .launcher.launch import launch as launch
    from .policies.recovery import RecoveryPolicy as RecoveryPolicy
    from .policies.retention import Best as Best
    from .policies.retention import EveryNth as EveryNth
    from .policies.retention import Latest as Latest
    from .policies.retention import Steps as Steps
    from .policies.triggers import AtEnd as AtEnd
    from .policies.triggers import AtSteps as AtSteps
    from .policies.triggers import Every as Every
    from .policies.triggers import InMemory as InMemory
    from .policies.triggers import OnBest as OnBest
    from .state import TrainerControl as TrainerControl
    from .state import TrainerState as TrainerState
    from .stateful.component import Stateful as Stateful
    from .training.result import TrainResult as TrainResult
    from .training.run import Run as Run
    from .training.trainer import Trainer as Trainer
else:
    __getattr__, __dir__ = lazy_exports(__name__)
