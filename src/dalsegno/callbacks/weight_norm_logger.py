"""WeightNormLogger: how large the weights are, all together."""

from __future__ import annotations

from dalsegno.distributed.sharded_tensors import norms, parameter_shards, total_norm
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import LogContext


class WeightNormLogger(Callback):
    """Adds ``weight_norm`` to each evaluation's record: the L2 norm of all parameters taken as one vector.

    Frozen parameters count, a tied one counts once; it is the norm of the whole model, however that is spread. One
    wait for the device at each evaluation, nothing in between.
    """

    makes_wishes = False

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind == "eval":
            ctx.logs["weight_norm"] = float(total_norm(norms(parameter_shards(ctx.model))))
