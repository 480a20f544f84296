"""Callbacks of Lightning."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import dalsegno as ds
from dalsegno.interop.lightning import Lightning
from interop.tried import Tried, trainer

_GIVEN: dict[str, dict[str, Any]] = {
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
    "GradientAccumulationScheduler": {"scheduling": {0: 2}},
    "ModelPruning": {"pruning_fn": "l1_unstructured"},
    "ThroughputMonitor": {"batch_size_fn": len},
    "BasePredictionWriter": {"write_interval": "batch"},
    "OnExceptionCheckpoint": {"dirpath": "."},
}
"""Arguments without which one of those that are refused cannot be built."""


def lightning(name: str, *given: Any, **tried: Any) -> Tried:
    def make() -> Any:
        return getattr(importlib.import_module("pytorch_lightning.callbacks"), name)(*given, **_GIVEN.get(name, {}))

    return Tried(name, "pytorch-lightning", make, **tried)


def without_evaluations(output_dir: Path, *callbacks: Any) -> ds.Trainer:
    return trainer(output_dir, *callbacks, eval_steps=0, parts={})


TRIED = (
    lightning("EarlyStopping", "val_loss", 0.0, 2),
    lightning("LearningRateMonitor", None, True, True),
    lightning("LambdaCallback"),
    lightning(
        *("Timer", {"hours": 1}),
        differs="the time that it counts is that of all legs together, up to their last checkpoints",
        what=("callbacks.Timer",),
    ),
    *(lightning(name, refused=instead) for name, instead in Lightning.instead.items()),
)
