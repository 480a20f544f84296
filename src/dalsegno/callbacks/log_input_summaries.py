"""LogInputSummaries: what the inputs are like."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dalsegno import ranks
from dalsegno.callback import Callback
from dalsegno.contexts import LogContext, MicrobatchBeginContext

_MEASURED = 5  # numbers of each tensor: count, mean, sum of squared deviations from it, minimum, maximum


class LogInputSummaries(Callback):
    """Adds to each record of training ``input/<name>/mean``, ``std``, ``min`` and ``max`` of every tensor in the step's
    first micro-batch, over all ranks.

    Of batches that are mappings; tensors of numbers only, by their keys. NaN and infinity show in the values. The
    statistics are taken on the device and read with the record.
    """

    makes_wishes = False

    def __init__(self) -> None:
        self._names: list[str] = []
        self._measured: Tensor | None = None
        self._of_step = 0

    def on_microbatch_begin(self, ctx: MicrobatchBeginContext) -> None:
        if ctx.index or not ctx.state.will_log or not isinstance(ctx.batch, Mapping):
            return
        tensors = {
            str(name): each for name, each in ctx.batch.items() if isinstance(each, Tensor) and not each.is_complex()
        }
        self._names = list(tensors)
        self._measured = (
            torch.stack([_measure(each, bool(ctx.samples)) for each in tensors.values()]) if tensors else None
        )
        self._of_step = ctx.state.global_step + 1

    def on_log_step(self, ctx: LogContext) -> None:
        measured, self._measured = self._measured, None
        if ctx.kind != "train" or measured is None or self._of_step != ctx.state.global_step:
            return
        each_rank = torch.tensor(ranks.gather_floats(measured.flatten().tolist()), dtype=torch.float64)
        by_rank = each_rank.reshape(-1, len(self._names), _MEASURED)
        for number, name in enumerate(self._names):
            counts, means, deviations = by_rank[:, number, :3].unbind(1)
            count = counts.sum()  # of no elements: the rest is NaN
            mean = (counts * means).sum() / count
            variance = (deviations + counts * (means - mean).square()).sum() / count
            ctx.logs[f"input/{name}/mean"] = float(mean)
            ctx.logs[f"input/{name}/std"] = float(variance.sqrt())
            ctx.logs[f"input/{name}/min"] = float(by_rank[:, number, 3].min())
            ctx.logs[f"input/{name}/max"] = float(by_rank[:, number, 4].max())


def _measure(tensor: Tensor, counts: bool) -> Tensor:
    """Shape (5,), float64. Of padding: nothing."""
    if not counts or not tensor.numel():
        return torch.tensor([0.0, 0.0, 0.0, math.inf, -math.inf], dtype=torch.float64, device=tensor.device)
    flat = tensor.detach().double()
    count = torch.full((), flat.numel(), dtype=torch.float64, device=flat.device)
    mean = flat.mean()
    return torch.stack([count, mean, (flat - mean).square().sum(), flat.min(), flat.max()])
