"""ParameterNormLogger: how large every parameter is, as a vector and as a matrix, at each evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from torch import Tensor

from dalsegno.distributed.sharded_tensors import norms, parameter_shards
from dalsegno.errors import ConfigurationError
from dalsegno.events.contexts import EvaluateContext
from dalsegno.logs.rewind import PositionState

from .argument_checks import flag, whole
from .measures.spectral_norm import SpectralNorms, Vector
from .record_callback import RecordCallback


class ParameterNormState(TypedDict):
    log: PositionState | None
    vectors: dict[str, Vector]
    last_step: int


class ParameterNormLogger(RecordCallback):
    """Writes a record into ``logs/parameter_norms.jsonl`` at each step that ends with an evaluation.

    ``norms`` holds the L2 norm (fp32) of each parameter, ``spectral_norms`` the largest singular value of each as a
    matrix of its first dimension by all others; of a parameter with one dimension it is the largest absolute value, of
    one with three that is no convolution's it is that of each matrix in it, under ``<name>.<number>``. It is iterated
    until it is right to 0.05 % (:mod:`dalsegno.callbacks.measures.spectral_norm`); ``unfinished`` holds the relative
    residuals of those squared norms that ``power_iter_steps`` were too few for. Both under the parameters' own names, a
    tied one once, of whole parameters however the model is spread.

    The iteration goes on from its last vector, which is part of the callback's state, and begins at a vector that
    depends on the parameter's name alone: the training's random numbers are not touched. Other steps cost nothing.

    Args:
        log_norms: write ``norms``.
        log_spectral_norms: write ``spectral_norms``.
        power_iter_steps: the most iterations at an evaluation.

    Raises:
        ConfigurationError: for a value that cannot work.
    """

    state_schema = ParameterNormState

    def __init__(self, log_norms: bool = True, log_spectral_norms: bool = True, power_iter_steps: int = 200) -> None:
        super().__init__("logs/parameter_norms.jsonl")
        steps = whole("ParameterNormLogger", "power_iter_steps", power_iter_steps)
        self._log_norms = flag("ParameterNormLogger", "log_norms", log_norms)
        is_spectral = flag("ParameterNormLogger", "log_spectral_norms", log_spectral_norms)
        if not (log_norms or is_spectral):
            raise ConfigurationError("ParameterNormLogger: log_norms=False and log_spectral_norms=False writes nothing")
        self._spectral = SpectralNorms(steps) if is_spectral else None
        self._last_step = -1

    def on_evaluate(self, ctx: EvaluateContext) -> None:
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
