"""The demo's training run: a small transformer on the source files of Python's standard library, byte by byte."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dalsegno.args import TrainingArguments
from dalsegno.callbacks import DivergenceDetector, GradNormLogger, JsonLogger
from dalsegno.errors import EmptyDataset
from dalsegno.events.callback import Callback
from dalsegno.testing import DataOrder, TinyLanguageModel
from dalsegno.training.trainer import Trainer

CONTEXT = 64
"""Length of a sample, in bytes."""
BATCH = 16
"""Samples per step."""
VALIDATION_SAMPLES = 256
CHECKPOINTS = 6
"""Checkpoints of the run, the last one at its end."""

_FOREIGN = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
_MOST_BYTES = 16 << 20
_EVERY = 10  # one file in ten is for validation


def source_files() -> list[Path]:
    """The modules of the installed standard library without its tests, sorted by path; at most 16 MiB."""
    root = sysconfig.get_paths()["stdlib"]
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _FOREIGN]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    found.sort()
    sizes = accumulate(path.stat().st_size for path in found)
    chosen = [path for path, size in zip(found, sizes, strict=True) if size <= _MOST_BYTES]
    if len(chosen) < _EVERY:
        raise EmptyDataset(f"{root}: no source files of the standard library, which the demo trains on")
    return chosen


class Text(Dataset[dict[str, Tensor]]):
    """Concatenated files, in samples of ``CONTEXT`` bytes with the following bytes as labels.

    A sample is ``{"input_ids": (CONTEXT,), "labels": (CONTEXT,)}``, int64. ``limit``: number of samples, spread evenly
    over the text.
    """

    def __init__(self, paths: Sequence[Path], limit: int | None = None) -> None:
        self._bytes = np.frombuffer(b"".join(path.read_bytes() for path in paths), dtype=np.uint8)
        samples = (len(self._bytes) - 1) // CONTEXT
        self._length = samples if limit is None else min(limit, samples)
        self._stride = samples // self._length * CONTEXT

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        begin = index * self._stride
        window = torch.from_numpy(self._bytes[begin : begin + CONTEXT + 1].astype(np.int64))
        return {"input_ids": window[:-1], "labels": window[1:]}


def build(output_dir: Path, *, steps: int, seed: int, watchers: Sequence[Callback] = ()) -> Trainer:
    """The demo's trainer; deterministic in its arguments."""
    torch.manual_seed(seed)
    paths = source_files()
    validation = set(paths[_EVERY // 2 :: _EVERY])
    return Trainer(
        TinyLanguageModel(width=64, depth=2, heads=2, context=CONTEXT),
        TrainingArguments(
            output_dir=output_dir,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=4 * BATCH,
            learning_rate=4e-3,
            weight_decay=0.01,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 10,
            logging_steps=max(1, steps // 60),
            logging_first_step=True,
            eval_steps=max(1, steps // 12),
            save_steps=steps // CHECKPOINTS,
            use_cpu=True,
            parallel="none",
            seed=seed,
        ),
        train_dataset=Text([path for path in paths if path not in validation]),
        eval_dataset=Text(sorted(validation), VALIDATION_SAMPLES),
        callbacks=[JsonLogger(run="demo"), DivergenceDetector(), GradNormLogger(), DataOrder(), *watchers],
    )
