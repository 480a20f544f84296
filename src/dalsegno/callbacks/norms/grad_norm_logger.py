"""GradNormLogger: writes the norm of each parameter's gradient at each evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

import torch

from dalsegno.callbacks import argument_checks
from dalsegno.callbacks.loggers.json_logger import RecordCallback
from dalsegno.distributed.gradients import GradientNorms
from dalsegno.distributed.sharded_tensors import DeviceScalars
from dalsegno.events import Event, contexts
from dalsegno.logs.rewind import Position


class GradNormState(TypedDict):
    log: Position | None
    of_step: int
    norms: dict[str, float] | None
    skipped: bool


class GradNormLogger(RecordCallback):
    """Logs the L2 norm of each parameter's gradient at each evaluation, in a separate log, for heatmaps.

    ``norms`` holds those of the clipped, whole gradients (fp32) under the parameters' names, also with
    ``fuse_optim_with_backward``. A tied parameter is included once; a parameter whose gradient the optimizer did not
    use is left out. If the run is stopped during that evaluation, the leg that repeats the evaluation writes the
    record. For a step that the fp16 gradient scaler skipped, the record has ``"skipped": true`` instead.

    Args:
        pattern: a regular expression, searched in parameters' names. Only gradients of matching parameters are measured
            and written; None: all.
        path: of the log, as for :class:`JsonLogger`; None: ``logs/gradient_norms.jsonl``.
        name: the key of its state in checkpoints; None: the class's name.
    """

    state_schema = GradNormState
    only_at_evaluations = True
    optional_events = (Event.STEP_SKIPPED,)

    def __init__(self, pattern: str | None = None, *, path: str | Path | None = None, name: str | None = None) -> None:
        super().__init__("logs/gradient_norms.jsonl", path, name)
        self._measures = (
            None if pattern is None else argument_checks.pattern("GradNormLogger", "pattern", pattern).search
        )
        self._watch: GradientNorms | None = None
        self._norms: DeviceScalars | None = None
        self._of_step = 0
        self._is_skipped = False  # by the gradient scaler

    def on_step_skipped(self, ctx: contexts.Context) -> None:
        self._is_skipped = True

    def on_step_begin(self, ctx: contexts.Context) -> None:
        self._is_skipped = False

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        state = ctx.state
        self._watch = GradientNorms(ctx.model, ctx.optimizer, lambda: state.will_evaluate, self._measures)
        super().on_train_begin(ctx)

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        if ctx.state.will_evaluate and self._watch is not None:
            self._norms, self._of_step = self._watch.take(), ctx.state.global_step

    def on_evaluate(self, ctx: contexts.EvaluateContext) -> None:
        measured, self._norms = self._norms, None
        if self.writing and measured is not None and self._of_step == ctx.state.global_step:
            self.write(ctx, {"skipped": True} if self._is_skipped else {"norms": measured.read()})

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        super().on_train_end(ctx)
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def state_dict(self) -> GradNormState:
        norms = None if self._norms is None else self._norms.read()
        return {"log": super().state_dict(), "of_step": self._of_step, "norms": norms, "skipped": self._is_skipped}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["log"])
        norms, self._of_step = state["norms"], state["of_step"]
        self._is_skipped = state["skipped"]
        self._norms = None if norms is None else DeviceScalars(list(norms), torch.tensor(list(norms.values())))
