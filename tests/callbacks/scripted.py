"""Real training runs whose losses are known beforehand."""

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dalsegno as ds
from dalsegno.callbacks import DefaultMetrics, JsonLogger
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import LogContext

BATCH_SIZE = 4
TOKENS = 3
"""Of each sample."""


class Scripted(nn.Module):
    """The loss of its n-th training batch is the n-th of ``losses``, the last one for ever; the count is in its state.

    In evaluation the loss is the one that training has come to.
    """

    def __init__(self, losses: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("losses", torch.tensor(losses, dtype=torch.float64), persistent=False)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, **batch: Tensor) -> Tensor:
        place = min(int(self.batches), len(self.losses) - 1)
        if self.training:
            self.batches += 1
        return self.losses[place] + 0.5 * (self.weight - self.weight.detach()).sum()


class Kept(Callback):
    """Keeps every record, with its kind and step."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int, dict[str, Any]]] = []

    def on_log(self, ctx: LogContext) -> None:
        self.records.append((ctx.kind, ctx.state.global_step, dict(ctx.logs)))

    def of(self, kind: str) -> dict[int, dict[str, Any]]:
        return {step: logs for each, step, logs in self.records if each == kind}


def trainer(
    output_dir: Path, losses: Sequence[float], *callbacks: Callback, with_tokens: bool = False, **arguments: Any
) -> ds.Trainer:
    """A run of as many steps as there are losses, a record at each, and a checkpoint at the end."""
    sample = {"input_ids": torch.zeros(TOKENS, dtype=torch.int64)} if with_tokens else {"x": torch.zeros(1)}
    settings = {"max_steps": len(losses), "logging_steps": 1, "max_grad_norm": 0.0, "use_cpu": True, **arguments}
    return ds.Trainer(
        Scripted(losses),
        ds.TrainingArguments(output_dir, per_device_train_batch_size=BATCH_SIZE, **settings),
        train_dataset=[sample] * (10 * BATCH_SIZE),
        eval_dataset=[sample] * BATCH_SIZE,
        callbacks=callbacks,
    )


def logs_of_a_rank(output_dir: Path) -> tuple[list[tuple[str, int, dict[str, Any]]], str]:
    """What one rank of several logs when it trains three steps, and what it prints."""
    kept, printed = Kept(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer(
            output_dir, [1.0] * 3, DefaultMetrics(peak_flops_per_device=1e9), JsonLogger(), kept, with_tokens=True
        ).train()
    return kept.records, printed.getvalue()
