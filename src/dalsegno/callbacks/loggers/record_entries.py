"""LogOptimizerParamGroup, LogInputSummaries, SamplesStreamedInfo: further entries of the training records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dalsegno.callbacks.argument_checks import texts
from dalsegno.distributed import accelerator, collectives
from dalsegno.errors import UnknownName
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import LogContext, MicrobatchBeginContext, TrainBeginContext


class LogOptimizerParamGroup(Callback):
    """Logs each parameter group's learning rate or other settings in each training record, as ``<key>/<group>``.

    ``<group>`` is the group's ``name`` if it has a unique one, else its number. Values are read when the record is
    made: the learning rate is that of the next update.

    Args:
        keys: names of settings, such as ``["lr", "weight_decay"]``, or a single name.

    Raises:
        ConfigurationError: if there is no key, or a key is not a string.
        UnknownName: when training begins, if no group has the setting; the message names the nearest.
    """

    sets_control_flags = False

    def __init__(self, keys: str | Iterable[str]) -> None:
        self._keys = texts("LogOptimizerParamGroup", "keys", keys)

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        known = {key for group in ctx.optimizer.param_groups for key in group} - {"params"}
        for key in self._keys:
            if key not in known:
                raise UnknownName("LogOptimizerParamGroup: key", key, sorted(known))

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind != "train":
            return
        groups = ctx.optimizer.param_groups
        for title, group in zip(_titles(groups), groups, strict=True):
            for key in self._keys:
                if key in group:
                    value = group[key]
                    is_number = hasattr(value, "__float__") and not isinstance(value, bool)
                    ctx.logs[f"{key}/{title}"] = float(value) if is_number else value


def _titles(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    titles = [str(group.get("name", number)) for number, group in enumerate(groups)]
    often = Counter(titles)
    return [title if often[title] == 1 else str(number) for number, title in enumerate(titles)]


class LogInputSummaries(Callback):
    """Logs mean, standard deviation, minimum and maximum of each input tensor in each training record.

    They are ``input/<name>/mean``, ``std``, ``min`` and ``max``, of the step's first micro-batch over all ranks. Only
    for batches that are mappings; ``<name>`` is the key. Complex tensors are left out. NaN and infinity propagate.
    """

    sets_control_flags = False

    def __init__(self) -> None:
        self._measured: dict[str, Tensor] = {}
        self._of_step = 0

    def on_microbatch_begin(self, ctx: MicrobatchBeginContext) -> None:
        if ctx.index or not ctx.state.will_log:
            return
        batch = ctx.batch if ctx.samples and isinstance(ctx.batch, Mapping) else {}  # padding is not measured
        tensors = {str(name): each for name, each in batch.items() if isinstance(each, Tensor)}
        self._measured = {name: _measure(each) for name, each in tensors.items() if not each.is_complex()}
        self._of_step = ctx.state.global_step + 1

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind != "train" or self._of_step != ctx.state.global_step:
            return
        measured, self._measured = self._measured, {}
        numbers = torch.stack([*measured.values()]).tolist() if measured else []
        here = dict(zip(measured, numbers, strict=True))
        gathered = ctx.layout.of_data_ranks(collectives.gather(here, "LogInputSummaries"))
        for name in dict.fromkeys(name for each in gathered for name in each):
            of_ranks = torch.tensor([each[name] for each in gathered if name in each], dtype=torch.float64)
            counts, means, deviations, lowest, highest = of_ranks.unbind(1)
            count = counts.sum()  # without elements, mean and deviation are NaN
            mean = (counts * means).sum() / count
            variance = (deviations + counts * (means - mean).square()).sum() / count
            ctx.logs[f"input/{name}/mean"] = float(mean)
            ctx.logs[f"input/{name}/std"] = float(variance.sqrt())
            ctx.logs[f"input/{name}/min"] = float(lowest.min())
            ctx.logs[f"input/{name}/max"] = float(highest.max())


def _measure(tensor: Tensor) -> Tensor:
    """Return count, mean, sum of squared deviations from the mean, minimum, maximum: shape (5,), in the device's widest
    dtype."""
    if not tensor.numel():
        return accelerator.wide(torch.tensor([0.0, 0.0, 0.0, torch.inf, -torch.inf], device=tensor.device))
    flat = accelerator.wide(tensor.detach())
    count = torch.full((), flat.numel(), dtype=flat.dtype, device=flat.device)
    mean = flat.mean()
    return torch.stack([count, mean, (flat - mean).square().sum(), flat.min(), flat.max()])


class SamplesStreamedInfo(Callback):
    """Logs ``samples``, the samples trained on so far on all ranks, in each training record and the final one.

    Counts over all legs of the run, each sample as often as it was used. Padding does not count.
    """

    sets_control_flags = False

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind in ("train", "final"):
            ctx.logs["samples"] = ctx.state.samples_seen
