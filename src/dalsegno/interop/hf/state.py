"""State: the run's state, with all fields and methods of Hugging Face's ``TrainerState``."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from dalsegno.state import TrainerState

from .args import Arguments

_FIELDS = (
    "epoch",
    "global_step",
    "max_steps",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "train_batch_size",
    "num_train_epochs",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
    "is_local_process_zero",
    "is_world_process_zero",
    "is_hyper_param_search",
    "trial_name",
    "trial_params",
    "stateful_callbacks",
)
"""Fields of Hugging Face's class, so that its ``load_from_json`` reads what :meth:`State.save_to_json` writes."""


class State:
    """Reads and writes the run's state; keeps fields that the run's state lacks, for callbacks of this dialect only."""

    def __init__(self, state: TrainerState, args: Arguments, log_history: list[dict[str, Any]]) -> None:
        self._state = state
        self._args = args
        self.log_history = log_history
        self.logging_steps = args.logging_steps
        self.eval_steps = args.eval_steps
        self.save_steps = args.save_steps
        self.train_batch_size = args.train_batch_size
        self.is_hyper_param_search = False
        self.trial_name: str | None = None
        self.trial_params: dict[str, Any] | None = None
        self.stateful_callbacks: dict[str, Any] = {}
        self.steps_set: int | None = None
        """``max_steps`` that a callback has set."""

    def __repr__(self) -> str:
        return f"TrainerState({', '.join(f'{name}={getattr(self, name)!r}' for name in _FIELDS)})"

    @property
    def max_steps(self) -> int:
        """``sys.maxsize`` where the data's length is unknown: callbacks compare this with the step."""
        return self._state.max_steps if self._state.max_steps > 0 else sys.maxsize

    @max_steps.setter
    def max_steps(self, steps: int) -> None:
        """A number below the run's ends it there; a larger one only changes what callbacks read."""
        self._state.max_steps = self.steps_set = steps

    @property
    def num_train_epochs(self) -> int:
        return math.ceil(self._state.num_train_epochs)

    @property
    def best_model_checkpoint(self) -> str | None:
        best = self._state.best_model_checkpoint
        return None if best is None else str(Path(self._args.output_dir) / best)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._state, name)

    def compute_steps(self, args: Any, max_steps: int) -> None:
        """Convert steps given as a fraction of ``max_steps`` into numbers of steps."""
        for kind in ("logging_steps", "eval_steps", "save_steps"):
            steps = getattr(args, kind)
            if steps is not None:
                setattr(self, kind, math.ceil(max_steps * steps) if steps < 1 else steps)

    def save_to_json(self, json_path: str) -> None:
        values = {name: getattr(self, name) for name in _FIELDS}
        Path(json_path).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _delegated(name: str) -> property:
    def write(state: Any, value: Any) -> None:
        setattr(state._state, name, value)

    return property(attrgetter(f"_state.{name}"), write)


for _field in fields(TrainerState):
    if _field.name not in vars(State):
        setattr(State, _field.name, _delegated(_field.name))
