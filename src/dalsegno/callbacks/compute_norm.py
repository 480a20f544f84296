"""ComputeNorm: norms of weights and gradients, of the whole model and of each layer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from dalsegno.distributed.sharded_tensors import (
    PartialSums,
    gradient_shards,
    parameter_shards,
    partial_squares,
    read_together,
    whole_sums,
)
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import Context, LogContext

from .argument_checks import flag


class ComputeNorm(Callback):
    """Logs the L2 norms of all parameters and of all gradients in each training record:

    - ``param_norm``: norm of all parameters as one vector.
    - ``grad_norm_unclipped``: norm of all gradients as one vector, reduced, unscaled and not clipped.
    - with ``per_layer``, ``param_norm/<layer>`` and ``grad_norm_unclipped/<layer>``, where a layer is a module with
      direct parameters, under its name in the model.

    The norms are of whole tensors, however the model is parallelized; gradients are those of the logged step. Steps
    without a record cost nothing.

    Args:
        per_layer: log the norms of each layer, too.

    Raises:
        ConfigurationError: if ``per_layer`` is neither True nor False.
    """

    sets_control_flags = False

    def __init__(self, per_layer: bool = False) -> None:
        self._per_layer = flag("ComputeNorm", "per_layer", per_layer)
        self._gradients: PartialSums | None = None
        self._of_step = 0

    def on_gradients_ready(self, ctx: Context) -> None:
        if ctx.state.will_log:
            self._gradients = partial_squares(gradient_shards(ctx.model))
            self._of_step = ctx.state.global_step + 1

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind != "train":
            return
        gradients, self._gradients = self._gradients, None
        measured = {"param_norm": partial_squares(parameter_shards(ctx.model))}
        if gradients is not None and self._of_step == ctx.state.global_step:
            measured["grad_norm_unclipped"] = gradients
        norms = [each.roots() for each in whole_sums([*measured.values()])]
        for title, by_parameter in zip(measured, read_together(norms), strict=True):
            self._add(ctx.logs, title, by_parameter)

    def _add(self, logs: dict[str, float], title: str, by_parameter: Mapping[str, float]) -> None:
        logs[title] = math.hypot(*by_parameter.values())
        if self._per_layer:
            by_layer: dict[str, list[float]] = defaultdict(list)
            for name, norm in by_parameter.items():
                by_layer[name.rpartition(".")[0]].append(norm)
            logs |= {f"{title}/{layer}": math.hypot(*parts) for layer, parts in by_layer.items() if layer}
