"""dalsegno: a PyTorch training loop and callbacks whose state survives being killed.

Names are found when they are first used: importing dalsegno imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .args import TrainingArguments as TrainingArguments
    from .callback import Callback as Callback
    from .callback import register_global_callback as register_global_callback
    from .events import BackwardContext as BackwardContext
    from .state import TrainerControl as TrainerControl
    from .state import TrainerState as TrainerState
    from .trainer import Trainer as Trainer

_HOMES = {
    "TrainingArguments": "args",
    "Callback": "callback",
    "register_global_callback": "callback",
    "TrainerControl": "state",
    "TrainerState": "state",
    "Trainer": "trainer",
    "TrainResult": "result",
    "Event": "events",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'dalsegno' has no attribute {name!r}")
        return getattr(importlib.import_module(f".{home}", __name__), name)

    def __dir__() -> list[str]:
        return sorted([*globals(), *_HOMES])
