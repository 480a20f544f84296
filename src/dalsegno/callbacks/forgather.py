"""Callbacks of ``forgather.ml.trainer.callbacks`` under their names, with Forgather's defaults where they differ."""

from __future__ import annotations

from typing import Literal

from dalsegno.callbacks.control.diloco import DiLoCoCallback as DiLoCoCallback
from dalsegno.callbacks.control.divergence import DivergenceDetector as _DivergenceDetector
from dalsegno.callbacks.control.trainer_control import TrainerControlCallback as TrainerControlCallback
from dalsegno.callbacks.loggers.info_callback import InfoCallback as InfoCallback
from dalsegno.callbacks.loggers.json_logger import JsonLogger as JsonLogger
from dalsegno.callbacks.loggers.progress_callback import ProgressCallback as ProgressCallback
from dalsegno.callbacks.loggers.tensorboard import ResumableSummaryWriter as ResumableSummaryWriter
from dalsegno.callbacks.loggers.tensorboard import TBLogger as TBLogger
from dalsegno.callbacks.loggers.tensorboard import default_tb_scalars as default_tb_scalars
from dalsegno.callbacks.loggers.textgen_callback import TextgenCallback as TextgenCallback
from dalsegno.callbacks.norms.gradient_loggers import GradNormLogger as GradNormLogger
from dalsegno.callbacks.norms.parameter_norms import ParameterNormLogger as ParameterNormLogger
from dalsegno.callbacks.norms.parameter_norms import WeightNormLogger as WeightNormLogger
from dalsegno.callbacks.profiling.memory import PeakMemory as PeakMemory
from dalsegno.callbacks.profiling.profiler_callback import ProfilerCallback as ProfilerCallback
from dalsegno.callbacks.profiling.speed import DefaultMetrics as DefaultMetrics


class DivergenceDetector(_DivergenceDetector):
    """Stops a run whose average loss is 1.0 over its best, by default, and also at ``relative_threshold`` if given.

    :class:`dalsegno.callbacks.DivergenceDetector` judges by the noise of the loss by default, whatever its unit.
    """

    def __init__(
        self,
        smoothing: float = 0.3,
        threshold: float | None = 1.0,
        relative_threshold: float | None = None,
        patience: int = 3,
        warmup: int = 10,
        action: Literal["stop", "abort"] = "stop",
        use_eval_loss: bool = False,
        metric_key: str | None = None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(
            smoothing, threshold, relative_threshold, patience, warmup, action, use_eval_loss, metric_key, name=name
        )
