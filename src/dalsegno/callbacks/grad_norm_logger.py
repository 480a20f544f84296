"""GradNormLogger: the norm of every parameter's gradient, at each evaluation."""

from __future__ import annotations

from dalsegno.contexts import EvaluateContext, PreOptimizerStepContext
from dalsegno.pieces import Readings, gradient_pieces, norms

from .record_callback import RecordCallback


class GradNormLogger(RecordCallback):
    """Writes ``norms``, the L2 norm (fp32) of each parameter's clipped gradient, into ``logs/gradient_norms.jsonl``.

    One record at each step that ends with an evaluation, under the parameters' own names; a tied parameter is there
    once, one without gradient not at all. The norms are of whole gradients, whichever way the model is spread. The
    values stay on the device until the evaluation is done; other steps cost nothing.
    """

    def __init__(self) -> None:
        super().__init__("logs/gradient_norms.jsonl")
        self._norms: Readings | None = None
        self._of_step = 0

    def on_pre_optimizer_step(self, ctx: PreOptimizerStepContext) -> None:
        if ctx.state.will_evaluate:
            self._norms = norms(gradient_pieces(ctx.model))
            self._of_step = ctx.state.global_step + 1

    def on_evaluate(self, ctx: EvaluateContext) -> None:
        measured, self._norms = self._norms, None
        if self.writing and measured is not None and self._of_step == ctx.state.global_step:
            self.write(ctx, {"norms": measured.read()})
