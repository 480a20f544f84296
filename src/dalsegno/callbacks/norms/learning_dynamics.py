"""LearningDynamics: relative size of each update, and signal-to-noise ratio of the gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dalsegno.callbacks.argument_checks import whole
from dalsegno.callbacks.loggers.json_logger import RecordCallback
from dalsegno.distributed import accelerator
from dalsegno.distributed.sharded_tensors import (
    DeviceScalars,
    LocalShard,
    PartialSums,
    named_parameters,
    own_part,
    parameter_shards,
    partial_squares,
    read_together,
    squared_norms,
    whole_sums,
)
from dalsegno.events import Event, contexts

_KINDS = {"exp_avg", "exp_avg_sq", "step"}


class LearningDynamics(RecordCallback):
    """Logs how fast each parameter learns every ``every`` steps, in ``logs/learning_dynamics.jsonl``:

    - ``weight_norms``: L2 norm after the update.
    - ``update_ratios``: L2 norm of the update over that of the weights before it, ‖Δw‖ / ‖w‖. Infinite for weights that
      were zero.
    - ``gradient_snr``: signal-to-noise ratio of the gradient, ‖m‖² / (Σ v − ‖m‖²), where m and v are the optimizer's
      running means of the gradient and its square (``exp_avg``, ``exp_avg_sq`` of Adam and similar optimizers),
      corrected for their start at zero (Liu et al. 2020, arXiv:2001.07384). Only where the optimizer has them.

    For a step that the fp16 gradient scaler skipped, the record has ``"skipped": true`` instead. A step with a record
    holds a copy of the weights meanwhile.

    Args:
        every: steps between records.
    """

    optional_events = (Event.STEP_SKIPPED,)

    def __init__(self, every: int = 100) -> None:
        super().__init__("logs/learning_dynamics.jsonl")
        self._every = whole("LearningDynamics", "every", every)
        self._before: list[LocalShard] = []
        self._measured: list[DeviceScalars] = []
        self._is_skipped = False  # by the gradient scaler

    def on_step_skipped(self, ctx: contexts.Context) -> None:
        self._is_skipped = True

    def on_pre_optimizer_step(self, ctx: contexts.PreOptimizerStepContext) -> None:
        if (ctx.state.global_step + 1) % self._every == 0:
            self._before = [LocalShard(piece.name, piece.local.clone(), piece.groups) for piece in _trained_pieces(ctx)]

    def on_optimizer_step(self, ctx: contexts.Context) -> None:
        before, self._before = self._before, []
        if not before:
            return
        after = _trained_pieces(ctx)
        partial = [partial_squares(before), partial_squares(after), *_partial_means(ctx, after)]
        torch._foreach_sub_([piece.local for piece in before], [piece.local for piece in after])  # reuses the copy
        earlier, weights, signal, power, has_means, update = whole_sums([*partial, partial_squares(before)])
        ratios = DeviceScalars(weights.names, update.roots().values / earlier.roots().values)
        noise = (power.values - signal.values).clamp(min=0)
        snr = DeviceScalars(signal.names, signal.values / noise)
        self._measured = [weights.roots(), ratios, snr, has_means]

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        measured, self._measured = self._measured, []
        is_skipped, self._is_skipped = self._is_skipped, False
        if not measured or not self.writing:
            return
        if is_skipped:
            self.write(ctx, {"skipped": True})
            return
        weights, ratios, every, has_means = read_together(measured)
        snr = {name: value for name, value in every.items() if has_means[name]}
        self.write(ctx, {"weight_norms": weights, "update_ratios": ratios} | ({"gradient_snr": snr} if snr else {}))


def _trained_pieces(ctx: contexts.Context) -> list[LocalShard]:
    trained = {name for name, parameter in named_parameters(ctx.model) if parameter.requires_grad}
    return [piece for piece in parameter_shards(ctx.model) if piece.name in trained]


def _partial_means(ctx: contexts.Context, pieces: Sequence[LocalShard]) -> list[PartialSums]:
    """Return, for each trained tensor, the squared norm of the optimizer's mean of its gradient and the sum of the mean
    squares, both corrected for their start at zero, and a number over 0 if the optimizer has them on some rank."""
    betas = {id(each): group.get("betas") for group in ctx.optimizer.param_groups for each in group["params"]}
    parameters = dict(named_parameters(ctx.model))
    numbers: list[int] = []
    means: list[Tensor] = []
    squares: list[Tensor] = []
    starts: list[Tensor] = []  # bias corrections of the squared mean and of the mean square
    for number, piece in enumerate(pieces):
        parameter = parameters[piece.name]
        state = ctx.optimizer.state.get(parameter, {})
        if not (state.keys() >= _KINDS and betas.get(id(parameter))):
            continue
        beta1, beta2 = betas[id(parameter)]  # type: ignore[misc]
        step = accelerator.wide(torch.as_tensor(state["step"]))  # 1 - 0.999^step has few digits in fp32
        starts.append(torch.stack([(1 - beta1**step) ** 2, 1 - beta2**step]))
        numbers.append(number)
        means.append(own_part(parameter, state["exp_avg"]))
        squares.append(own_part(parameter, state["exp_avg_sq"]))
    device = pieces[0].local.device
    rows = torch.zeros(len(pieces), 3, dtype=accelerator.wide_dtype(device), device=device)
    if numbers:
        sums = torch.stack([each.sum(dtype=rows.dtype) for each in squares])
        measured = torch.stack([squared_norms(means), sums], 1)
        corrected = measured / torch.stack(starts).to(device)  # before the sum: each rank knows its own steps
        rows[torch.tensor(numbers, device=device)] = torch.nn.functional.pad(corrected, (0, 1), value=1.0)
    return [PartialSums.of(pieces, column) for column in rows.T]
