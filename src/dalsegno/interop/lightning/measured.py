"""Measured: the newest metrics of a run, under dalsegno's and Lightning's names, beside its progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dalsegno.events.contexts import Context, LogContext, TrainBeginContext
from dalsegno.interop.progress import Progress, ProgressState
from dalsegno.logs import is_wall_clock


class LightningState(ProgressState):
    metrics: dict[str, Any]


class Measured(Progress):
    """The newest metrics, which are saved with the run."""

    state_schema = LightningState
    state_compared = False  # what a callback logs may differ between ranks, as in Lightning

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.metrics: dict[str, Any] = {}
        """``trainer.callback_metrics``."""
        self.resumed_from: str | None = None

    def log(self, values: Mapping[str, Any]) -> None:
        """Log what a callback has measured."""
        self.collected.add(values)
        self.metrics |= {name: torch.as_tensor(value).detach() for name, value in values.items()}

    def position(self) -> dict[str, int]:
        """What a checkpoint's dict has when a callback gets it."""
        return {"epoch": self.epoch, "global_step": self.context.state.global_step}

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        super().on_train_begin(ctx)
        self.resumed_from = None if ctx.resumed_from is None else str(ctx.resumed_from)

    def on_log(self, ctx: LogContext) -> None:
        for name, value in ctx.logs.items():
            if isinstance(value, (int, float)) and not is_wall_clock(name):
                self.metrics[name] = self.metrics[_their_name(name)] = torch.tensor(float(value))

    def state_dict(self) -> Any:
        return {**super().state_dict(), "metrics": self.metrics}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.metrics = dict(state["metrics"])


def _their_name(name: str) -> str:
    """Return the name that most modules give a metric: ``val_loss`` for ``eval_loss``, ``train_loss`` for ``loss``."""
    if name.startswith("eval_"):
        return f"val_{name.removeprefix('eval_')}"
    return "train_loss" if name == "loss" else name
