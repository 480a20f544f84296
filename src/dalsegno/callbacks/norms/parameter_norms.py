"""WeightNormLogger, ComputeNorm, ParameterNormLogger: norms of parameters, and of all gradients."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from dalsegno.callbacks.argument_checks import flag, whole
from dalsegno.callbacks.loggers.json_logger import RecordCallback
from dalsegno.callbacks.norms.spectral_norm import SpectralNorms, Vector
from dalsegno.distributed.sharded_tensors import (
    PartialSums,
    gradient_shards,
    norms,
    parameter_shards,
    partial_squares,
    read_together,
    total_norm,
    whole_sums,
)
from dalsegno.errors import ConfigurationError
from dalsegno.events import Event, FlaglessCallback, contexts
from dalsegno.logs.rewind import Position


class WeightNormLogger(FlaglessCallback):
    """Logs ``weight_norm``, the L2 norm of all parameters as one vector, at each evaluation.

    Of the weights that are evaluated: of an average, if the record has ``evaluated_weights``. Includes frozen
    parameters, and a tied parameter once; of the whole model, however it is parallelized. Waits for the device once per
    evaluation; other steps cost nothing.
    """

    optional_events = (Event.EVALUATE_BEGIN, Event.EVALUATE_END)  # a loop without them evaluates no averages

    def __init__(self) -> None:
        self._squares: PartialSums | None = None  # of the evaluation in progress

    def on_evaluate_begin(self, ctx: contexts.EvaluateBeginContext) -> None:
        """Measure averages of a callback that comes before this one: it removes them before this one's next call."""
        self._squares = partial_squares(parameter_shards(ctx.model)) if ctx.evaluated_weights else None

    def on_evaluate_end(self, ctx: contexts.EvaluateEndContext) -> None:
        """Measure all others. Not collective, since an exception may have ended the evaluation."""
        if self._squares is None:
            self._squares = partial_squares(parameter_shards(ctx.model))

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind == "eval":
            squares, self._squares = self._squares or partial_squares(parameter_shards(ctx.model)), None
            ctx.logs["weight_norm"] = float(total_norm(*(each.roots() for each in whole_sums([squares]))))


class ComputeNorm(FlaglessCallback):
    """Logs the L2 norms of all parameters and of all gradients in each training record:

    - ``param_norm``: norm of all parameters as one vector.
    - ``grad_norm_unclipped``: norm of all gradients as one vector, reduced, unscaled and not clipped.
    - with ``per_layer``, ``param_norm/<layer>`` and ``grad_norm_unclipped/<layer>``, where a layer is a module with
      direct parameters, under its name in the model.

    Args:
        per_layer: log the norms of each layer, too.
    """

    def __init__(self, per_layer: bool = False) -> None:
        self._per_layer = flag("ComputeNorm", "per_layer", per_layer)
        self._gradients: PartialSums | None = None
        self._of_step = 0

    def on_gradients_ready(self, ctx: contexts.Context) -> None:
        if ctx.state.will_log:
            self._gradients = partial_squares(gradient_shards(ctx.model))
            self._of_step = ctx.state.global_step + 1

    def on_log_step(self, ctx: contexts.LogContext) -> None:
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


class ParameterNormState(TypedDict):
    log: Position | None
    vectors: dict[str, Vector]
    last_step: int


class ParameterNormLogger(RecordCallback):
    """Logs the L2 and spectral norm of each parameter at each evaluation, in a separate log.

    ``norms`` holds the L2 norm (fp32) of each parameter; ``spectral_norms`` its largest singular value as a matrix of
    its first dimension by all others, to 0.05 % (:mod:`dalsegno.callbacks.norms.spectral_norm`). For a parameter with
    one dimension that is the largest absolute value; one with three, except a convolution's, has the value of each
    matrix in it, under ``<name>.<number>``. ``unfinished`` holds the relative residuals of those squared norms for
    which ``power_iter_steps`` were too few. The iteration resumes from its last vector, which is part of the callback's
    state; the training's random generators are not used.

    Args:
        log_norms: write ``norms``.
        log_spectral_norms: write ``spectral_norms``.
        power_iter_steps: maximum number of iterations per evaluation.
        path: of the log, as for :class:`JsonLogger`; None: ``logs/parameter_norms.jsonl``.
        name: the key of its state in checkpoints; None: the class's name.
    """

    state_schema = ParameterNormState
    only_at_evaluations = True

    def __init__(
        self,
        log_norms: bool = True,
        log_spectral_norms: bool = True,
        power_iter_steps: int = 200,
        *,
        path: str | Path | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__("logs/parameter_norms.jsonl", path, name)
        steps = whole("ParameterNormLogger", "power_iter_steps", power_iter_steps)
        self._log_norms = flag("ParameterNormLogger", "log_norms", log_norms)
        is_spectral = flag("ParameterNormLogger", "log_spectral_norms", log_spectral_norms)
        if not (log_norms or is_spectral):
            raise ConfigurationError("ParameterNormLogger: log_norms=False and log_spectral_norms=False writes nothing")
        self._spectral = SpectralNorms(steps) if is_spectral else None
        self._last_step = -1

    def on_evaluate(self, ctx: contexts.EvaluateContext) -> None:
        if self._last_step == ctx.state.global_step:  # another set of the same evaluation
            return
        self._last_step = ctx.state.global_step
        values: dict[str, Mapping[str, float]] = {}
        if self._log_norms:
            values["norms"] = norms(parameter_shards(ctx.model)).read()
        if self._spectral is not None:
            values["spectral_norms"] = self._spectral.measure(ctx.model).read()
            if self._spectral.unfinished:
                values["unfinished"] = self._spectral.unfinished
        self.write(ctx, values)

    def state_dict(self) -> ParameterNormState:
        vectors: dict[str, Tensor] = {} if self._spectral is None else self._spectral.vectors
        return {"log": super().state_dict(), "vectors": vectors, "last_step": self._last_step}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["log"])
        self._last_step = state["last_step"]
        if self._spectral is not None:
            self._spectral.vectors = dict(state["vectors"])
