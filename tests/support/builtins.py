"""Every built-in callback, as the tests build it, and a model that all of them can listen to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchmetrics.regression import MeanAbsoluteError

import dalsegno as ds
from dalsegno import callbacks
from dalsegno.testing import TinyRegression
from support.languages import Letters

# Those that can only be built with arguments, or do nothing interesting without.
RECIPES: dict[str, Callable[[], ds.Callback]] = {
    "DivergenceDetector": lambda: callbacks.DivergenceDetector(warmup=2, threshold=100.0),
    "JsonLogger": lambda: callbacks.JsonLogger(run="contract"),
    "DefaultMetrics": lambda: callbacks.DefaultMetrics(peak_flops_per_device=1e12),
    "ProgressCallback": lambda: callbacks.ProgressCallback(use_tqdm=False),
    "ProgressCallback with bars": lambda: callbacks.ProgressCallback(use_tqdm=True),
    "InfoCallback": lambda: callbacks.InfoCallback(verbose=True),
    "ComputeNorm": lambda: callbacks.ComputeNorm(per_layer=True),
    "EMA": lambda: callbacks.EMA(0.5),
    "EarlyStopping": lambda: callbacks.EarlyStopping(patience=100),
    "ExpertLoadBalance": lambda: callbacks.ExpertLoadBalance(every=2, router=r"layers\.3$"),
    "GarbageCollection": lambda: callbacks.GarbageCollection(every=2),
    "GradHistogram": lambda: callbacks.GradHistogram(every=2),
    "LearningDynamics": lambda: callbacks.LearningDynamics(every=2),
    "LogOptimizerParamGroup": lambda: callbacks.LogOptimizerParamGroup(["lr", "weight_decay"]),
    "PeakMemory": lambda: callbacks.PeakMemory(do_log=True),
    "ModelEvalMetrics": lambda: callbacks.ModelEvalMetrics(
        {"error": MeanAbsoluteError()}, select=lambda outputs, batch: (batch["y"], batch["y"])
    ),
    "ModelMerge": lambda: callbacks.ModelMerge(window=3),
    "Notify": lambda: callbacks.Notify("json://127.0.0.1:9/"),
    "ProfilerCallback": lambda: callbacks.ProfilerCallback(start_step=1, num_steps=1, with_stack=False),
    "ScaleLoss": lambda: callbacks.ScaleLoss(1.0),
    "SkipSamples": lambda: callbacks.SkipSamples(0),
    "ScopedFlags": lambda: callbacks.ScopedFlags({"cudnn.benchmark": True}),
    "TraceMalloc": lambda: callbacks.TraceMalloc(every=2),
    "TextgenCallback": lambda: callbacks.TextgenCallback(
        prompts=["the cat", "a"], generation_config={"do_sample": True}, generation_steps=4, max_new_tokens=3
    ),
}

OF_OTHER_SERVICES = {"MLflowLogger", "OptunaPruning", "WandbLogger"}
"""They need a package, a tracker or a trial: test_trackers.py and test_optuna_pruning.py show what holds for them."""
NAMES = [name for name in callbacks.__all__ if name not in OF_OTHER_SERVICES]
"""The built-ins that any run can have."""


class Model(TinyRegression):
    """One that all of them can listen to: given ids alone, it has logits for what follows."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if y is not None:
            return super().forward(x, y)
        letters = len(Letters.alphabet)
        logits: Tensor = self.layers(nn.functional.one_hot(x % 8, 8).float()) * torch.arange(letters, device=x.device)
        return logits


def build(name: str) -> ds.Callback:
    """The callback of that class's name; what follows a space tells recipes for one class apart."""
    recipe = RECIPES.get(name) or getattr(callbacks, name)
    callback = recipe()
    assert isinstance(callback, ds.Callback)
    return callback
