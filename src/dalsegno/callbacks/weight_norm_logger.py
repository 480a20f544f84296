"""WeightNormLogger: the norm of all weights."""

from __future__ import annotations

from dalsegno.distributed.sharded_tensors import norms, parameter_shards, total_norm
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import LogContext


class WeightNormLogger(Callback):
    """Logs ``weight_norm``, the L2 norm of all parameters as one vector, at each evaluation.

    Includes frozen parameters, and a tied parameter once; of the whole model, however it is parallelized. Waits for the
    device once per evaluation; other steps cost nothing.
    """

    sets_control_flags = False

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind == "eval":
            ctx.logs["weight_norm"] = float(total_norm(norms(parameter_shards(ctx.model))))
