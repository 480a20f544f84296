"""GradNormLogger: the norm of every parameter's gradient, at each evaluation."""

from __future__ import annotations

from typing import Any

import torch

from dalsegno.contexts import EvaluateContext, StepEndContext, TrainBeginContext, TrainEndContext
from dalsegno.gradients import GradientNorms
from dalsegno.pieces import Readings

from .record_callback import RecordCallback


class GradNormLogger(RecordCallback):
    """Writes ``norms``, the L2 norm (fp32) of each parameter's clipped gradient, into ``logs/gradient_norms.jsonl``.

    One record at each step that ends with an evaluation, under the parameters' own names; a tied parameter is there
    once, one whose gradient the optimizer did not take not at all. The norms are of whole gradients, whichever way the
    model is spread, and with ``fuse_optim_with_backward`` too: they are measured in the optimizer's step, wherever that
    is. The values stay on the device until the evaluation is done; other steps cost nothing. Where the run is stopped
    in that evaluation, the leg that does it again writes the record.
    """

    state_version = 2

    def __init__(self) -> None:
        super().__init__("logs/gradient_norms.jsonl")
        self._watch: GradientNorms | None = None
        self._norms: Readings | None = None
        self._of_step = 0

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        super().on_train_begin(ctx)
        state = ctx.state
        self._watch = GradientNorms(ctx.model, ctx.optimizer, lambda: state.will_evaluate)

    def on_step_end(self, ctx: StepEndContext) -> None:
        if ctx.state.will_evaluate and self._watch is not None:
            self._norms, self._of_step = self._watch.take(), ctx.state.global_step

    def on_evaluate(self, ctx: EvaluateContext) -> None:
        measured, self._norms = self._norms, None
        if self.writing and measured is not None and self._of_step == ctx.state.global_step:
            self.write(ctx, {"norms": measured.read()})

    def on_train_end(self, ctx: TrainEndContext) -> None:
        super().on_train_end(ctx)
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def state_dict(self) -> Any:
        norms = None if self._norms is None else self._norms.read()
        return {"log": super().state_dict(), "of_step": self._of_step, "norms": norms}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["log"])
        norms, self._of_step = state["norms"], state["of_step"]
        self._norms = None if norms is None else Readings(list(norms), torch.tensor(list(norms.values())))

    def migrate(self, state: Any, from_version: int) -> Any:
        return {"log": state, "of_step": 0, "norms": None}
