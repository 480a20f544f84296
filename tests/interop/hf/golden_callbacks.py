"""Callbacks with a state, for the run of :mod:`golden.full_run`. Nothing here may change."""

from __future__ import annotations

from typing import Any

import dalsegno as ds


class History(ds.TrainerCallback):
    """Keeps the steps of the records, and how long the run's own history is."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.length = 0

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)
        self.length = len(state.log_history)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps), "length": self.length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.length = list(state["steps"]), state["length"]


def golden_callbacks(world_size: int) -> list[Any]:
    if world_size > 1:  # transformers takes seconds to import, in each rank
        return [History()]
    from transformers import EarlyStoppingCallback

    return [History(), EarlyStoppingCallback(early_stopping_patience=50)]
