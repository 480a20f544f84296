"""A compiled model, with activation checkpointing in it: callbacks say the same of it, under the same names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import dalsegno as ds
from callbacks.grad_norm_ranks import Uneven
from callbacks.layouts import sentences, values
from dalsegno import callbacks
from dalsegno.checkpoint import CheckpointManager, read_tensors
from support.small import small_trainer

LOGS = [
    f"{name}.jsonl" for name in ("train", "gradient_norms", "parameter_norms", "grad_histograms", "learning_dynamics")
]
CLOCK = ("timestamp", "peak_mem", "_runtime", "_per_second")


def train(output_dir: Path, wrapped: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = Uneven()
    if wrapped:
        model.blocks[0] = checkpoint_wrapper(model.blocks[0])  # type: ignore[operator,index]
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    own: list[Any] = [
        callbacks.JsonLogger(),
        callbacks.InfoCallback(),
        callbacks.CountParams(depth=None),
        callbacks.ComputeNorm(per_layer=True),
        callbacks.WeightNormLogger(),
        callbacks.GradNormLogger(),
        callbacks.ParameterNormLogger(),
        callbacks.GradHistogram(every=2),
        callbacks.LearningDynamics(every=2),
        callbacks.ExpertLoadBalance(every=2, router=r"^blocks\.1$"),
        callbacks.EMA(0.9),
    ]
    parts = {"train_dataset": sentences(), "eval_dataset": sentences(4, seed=1)}
    settings = {"max_steps": 4, "logging_steps": 2, "eval_steps": 2, "save_steps": 4}
    small_trainer(output_dir, *own, model=model, parts=parts, **settings).train()


def test_the_same_under_the_same_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = {}
    for name, wrapped in (("plain", False), ("wrapped", True)):
        train(tmp_path / name, wrapped)
        printed[name] = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("output")]
    assert printed["wrapped"] == printed["plain"]
    for log in LOGS:
        plain, seen = (values(tmp_path / name / "logs" / log, CLOCK) for name in ("plain", "wrapped"))
        assert plain.keys() == seen.keys() and plain, log
        wrong = {place for place in plain if not math.isclose(plain[place], seen[place], rel_tol=1e-5, abs_tol=1e-9)}
        assert not wrong, log
    saved = [CheckpointManager(tmp_path / name).find() for name in ("plain", "wrapped")]
    averages = [read_tensors(each)["callbacks.EMA"].keys() for each in saved if each is not None]
    assert averages[0] == averages[1] == dict(Uneven().named_parameters()).keys() - {"frozen"}


def test_nothing_can_be_looked_into_that_torch_has_compiled(tmp_path: Path) -> None:
    """However it was compiled."""
    model = torch.compile(Uneven(), backend="eager")
    parts = {"train_dataset": sentences()}
    with pytest.raises(ds.ConfigurationError, match="a compiled model's modules cannot be observed"):
        small_trainer(tmp_path, callbacks.NaNChecker(), model=model, parts=parts, max_steps=2).train()  # type: ignore[arg-type]
