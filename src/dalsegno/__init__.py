"""dalsegno: a PyTorch training loop and callbacks whose state survives being killed.

Names are found when they are first used: importing dalsegno imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .args import TrainingArguments as TrainingArguments
    from .callback import Callback as Callback
    from .callback import GlobalHandle as GlobalHandle
    from .callback import global_callbacks as global_callbacks
    from .callback import register_global_callback as register_global_callback
    from .component import Stateful as Stateful
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
    from .errors import StateMismatch as StateMismatch
    from .errors import UnknownName as UnknownName
    from .events import AfterForwardContext as AfterForwardContext
    from .events import BackwardContext as BackwardContext
    from .events import BeforeForwardContext as BeforeForwardContext
    from .events import BeforeLoadContext as BeforeLoadContext
    from .events import BeforeSaveContext as BeforeSaveContext
    from .events import EpochContext as EpochContext
    from .events import EvaluateBeginContext as EvaluateBeginContext
    from .events import EvaluateContext as EvaluateContext
    from .events import Event as Event
    from .events import ExceptionContext as ExceptionContext
    from .events import LoadContext as LoadContext
    from .events import LogContext as LogContext
    from .events import LossContext as LossContext
    from .events import MetricsContext as MetricsContext
    from .events import MicrobatchBeginContext as MicrobatchBeginContext
    from .events import MicrobatchEndContext as MicrobatchEndContext
    from .events import PredictionStepContext as PredictionStepContext
    from .events import PreOptimizerStepContext as PreOptimizerStepContext
    from .events import RollbackContext as RollbackContext
    from .events import SaveContext as SaveContext
    from .events import SchedulerContext as SchedulerContext
    from .events import StepDoneContext as StepDoneContext
    from .events import StepEndContext as StepEndContext
    from .events import StepSkippedContext as StepSkippedContext
    from .events import TrainBeginContext as TrainBeginContext
    from .events import TrainEndContext as TrainEndContext
    from .own_loop import Run as Run
    from .result import TrainResult as TrainResult
    from .schedule import Every as Every
    from .state import TrainerControl as TrainerControl
    from .state import TrainerState as TrainerState
    from .trainer import Trainer as Trainer

_HOMES = {
    "args": ("TrainingArguments",),
    "callback": (
        "Callback",
        "GlobalHandle",
        "global_callbacks",
        "register_global_callback",
    ),
    "component": ("Stateful",),
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
        "StateMismatch",
        "UnknownName",
    ),
    "events": (
        "AfterForwardContext",
        "BackwardContext",
        "BeforeForwardContext",
        "BeforeLoadContext",
        "BeforeSaveContext",
        "EpochContext",
        "EvaluateBeginContext",
        "EvaluateContext",
        "Event",
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
    "own_loop": ("Run",),
    "result": ("TrainResult",),
    "schedule": ("Every",),
    "state": (
        "TrainerControl",
        "TrainerState",
    ),
    "trainer": ("Trainer",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'dalsegno' has no attribute {name!r}")
        found = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted([*globals(), *_HOME_OF])
