"""A callback with a state, for the run of :mod:`golden.full_run`. Nothing here may change."""

from __future__ import annotations

from typing import Any

import dalsegno as ds


class Losses:
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, context: Any) -> None:
        self.losses.append(context.loss)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def golden_callbacks(world_size: int) -> list[Any]:
    return [ds.adapt(Losses(), "instructlab")]
