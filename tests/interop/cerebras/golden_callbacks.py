"""A callback with a state, for the run of :mod:`golden.full_run`. Nothing here may change."""

from __future__ import annotations

from typing import Any

import dalsegno as ds


class Batches:
    def __init__(self) -> None:
        self.batches = 0
        self.validations = 0

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def on_validate_end(self, trainer: Any, model: Any, loop: Any) -> None:
        self.validations += 1

    def on_save_checkpoint(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["batches"] = self.batches

    def on_load_checkpoint(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]

    def on_save_trainer_state(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["validations"] = self.validations

    def on_load_trainer_state(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        self.validations = state_dict["validations"]


def golden_callbacks(world_size: int) -> list[Any]:
    return [ds.adapt(Batches(), "cerebras")]
