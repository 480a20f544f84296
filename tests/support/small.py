"""A small trainer with silent defaults, to be shaped by each test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dalsegno as ds
from dalsegno.testing import TinyRegression, tiny_regression_data

NOISY = ("DefaultMetrics", "ProgressCallback", "InfoCallback")


class ByteLines:
    """For ``TinyLanguageModel``: 24 samples of sixteen bytes, and the same shifted by one."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = torch.arange(index, index + 17) % 31
        return {"input_ids": text[:-1], "labels": text[1:]}


def arguments(output_dir: Path, **settings: Any) -> ds.TrainingArguments:
    """Four samples a step, and nothing logged, evaluated or saved unless ``settings`` say so."""
    quiet = {"logging_steps": 0, "eval_steps": 0, "save_steps": 0, "per_device_train_batch_size": 4}
    return ds.TrainingArguments(output_dir, **{**quiet, "use_cpu": True, "learning_rate": 0.01, **settings})


def small_trainer(
    output_dir: Path,
    *callbacks: Any,
    model: nn.Module | None = None,
    length: int = 20,
    parts: dict[str, Any] | None = None,
    **settings: Any,
) -> ds.Trainer:
    """Trains on ``length`` samples, without default callbacks. ``parts`` are the Trainer's, ``settings`` its args'."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"train_dataset": tiny_regression_data(length), **(parts or {})}
    model = TinyRegression() if model is None else model  # a compiled one has no truth
    trainer = ds.Trainer(model, arguments(output_dir, **settings), callbacks=callbacks, **given)
    own = {getattr(callback, "key", None) for callback in callbacks}
    for name in NOISY:
        if name not in own:
            trainer.remove_callback(name)
    return trainer


def weights(trainer: ds.Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bit by bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def rows(data: Any, indices: Sequence[int]) -> dict[str, Tensor]:
    """These samples of a dataset as one batch."""
    return {key: torch.stack([data[index][key] for index in indices]) for key in data[0]}
