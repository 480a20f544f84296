"""ParameterNormLogger: writes the L2 and spectral norm of each parameter at each evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from dalsegno.distributed.sharded_tensors import norms, parameter_shards
from dalsegno.errors import ConfigurationError
from dalsegno.events.contexts import EvaluateContext
from dalsegno.logs.rewind import PositionState

from .argument_checks import flag, folder, whole
from .measures.spectral_norm import SpectralNorms, Vector
from .record_callback import RecordCallback


class ParameterNormState(TypedDict):
    log: PositionState | None
    vectors: dict[str, Vector]
    last_step: int


class ParameterNormLogger(RecordCallback):
    """Logs the L2 and spectral norm of each parameter at each evaluation, in a separate log.

    ``norms`` holds the L2 norm (fp32) of each parameter; ``spectral_norms`` its largest singular value as a matrix of
    its first dimension by all others. For a parameter with one dimension that is the largest absolute value; one with
    three, except a convolution's, has the value of each matrix in it, under ``<name>.<number>``. Power iteration runs
    to a precision of 0.05 % (:mod:`dalsegno.callbacks.measures.spectral_norm`); ``unfinished`` holds the relative
    residuals of those squared norms for which ``power_iter_steps`` were too few. Both use the parameters' names, with a
    tied parameter once, and are of whole parameters, however the model is parallelized.

    The iteration resumes from its last vector, which is part of the callback's state. Its first vector depends on the
    parameter's name only, so the training's random generators are not used. Other steps cost nothing.

    Args:
        log_norms: write ``norms``.
        log_spectral_norms: write ``spectral_norms``.
        power_iter_steps: maximum number of iterations per evaluation.
        path: relative to ``output_dir``; None: ``logs/parameter_norms.jsonl``. With the suffix ``.json`` the file is a
            JSON array that is valid after every record, with ``.jsonl`` it has one record per line.
        name: the key of its state in checkpoints; None: the class's name.

    Raises:
        ConfigurationError: for an invalid value.
    """

    state_schema = ParameterNormState

    def __init__(
        self,
        log_norms: bool = True,
        log_spectral_norms: bool = True,
        power_iter_steps: int = 200,
        *,
        path: str | Path | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__("logs/parameter_norms.jsonl" if path is None else folder("ParameterNormLogger", "path", path))
        self.name = name
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
