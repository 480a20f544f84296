"""LearningDynamics: relative size of each update, and signal-to-noise ratio of the gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from dalsegno.distributed import accelerator
from dalsegno.distributed.sharded_tensors import (
    DeviceScalars,
    LocalShard,
    named_parameters,
    norms,
    own_part,
    parameter_shards,
    read_together,
    squared_norms,
    summed,
)
from dalsegno.distributed.stage_places import place_of
from dalsegno.events.callback import Binder
from dalsegno.events.contexts import Context, PreOptimizerStepContext, StepEndContext
from dalsegno.events.table import Event
from dalsegno.state import Handler

from .argument_checks import whole
from .record_callback import RecordCallback

_KINDS = {"exp_avg", "exp_avg_sq", "step"}
_NOTHING = torch.zeros(0)  # elsewhere, or not updated yet


class LearningDynamics(RecordCallback):
    """Logs how fast each parameter learns every ``every`` steps, in ``logs/learning_dynamics.jsonl``:

    - ``weight_norms``: L2 norm after the update.
    - ``update_ratios``: L2 norm of the update over that of the weights before it, ‖Δw‖ / ‖w‖. About 1e-3 is common;
      infinite for weights that were zero.
    - ``gradient_snr``: signal-to-noise ratio of the gradient, ‖m‖² / (Σ v − ‖m‖²), where m and v are the optimizer's
      running means of the gradient and its square (``exp_avg``, ``exp_avg_sq`` of Adam and similar optimizers),
      corrected for their start at zero. Only where the optimizer has them. The ratio of squared mean to variance is
      that of Liu et al. 2020, "Understanding Why Neural Networks Generalize Well Through GSNR of Parameters"
      (arXiv:2001.07384), over the steps that the means cover.

    For a step that the fp16 gradient scaler skipped, the record has ``"skipped": true`` instead. All values are of
    whole tensors, however the model is parallelized. A step with a record holds a copy of the weights meanwhile; other
    steps cost nothing.

    Args:
        every: steps between records.

    Raises:
        ConfigurationError: if ``every`` is not an integer.
    """

    def __init__(self, every: int = 100) -> None:
        super().__init__("logs/learning_dynamics.jsonl")
        self._every = whole("LearningDynamics", "every", every)
        self._before: list[LocalShard] = []
        self._measured: list[DeviceScalars] = []
        self._is_skipped = False  # by the gradient scaler

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        # Not a handler method: a user's own loop cannot fire this event, and must not be refused for it.
        return [*super().bound_handlers(binder), (Event.STEP_SKIPPED, self._note_skip)]

    def _note_skip(self, ctx: Context) -> None:
        self._is_skipped = True

    def on_pre_optimizer_step(self, ctx: PreOptimizerStepContext) -> None:
        if (ctx.state.global_step + 1) % self._every == 0:
            self._before = [LocalShard(piece.name, piece.local.clone(), piece.groups) for piece in _trained_pieces(ctx)]

    def on_optimizer_step(self, ctx: Context) -> None:
        before, self._before = self._before, []
        if not before:
            return
        after = _trained_pieces(ctx)
        weights = norms(before)
        torch._foreach_sub_([piece.local for piece in before], [piece.local for piece in after])  # reuses the copy
        updates = norms(before)
        ratios = DeviceScalars(weights.names, updates.values / weights.values)
        self._measured = [norms(after), ratios, _signal_to_noise(ctx)]

    def on_step_end(self, ctx: StepEndContext) -> None:
        measured, self._measured = self._measured, []
        is_skipped, self._is_skipped = self._is_skipped, False
        if not measured or not self.writing:
            return
        if is_skipped:
            self.write(ctx, {"skipped": True})
            return
        weights, ratios, snr = read_together(measured)
        self.write(ctx, {"weight_norms": weights, "update_ratios": ratios} | ({"gradient_snr": snr} if snr else {}))


def _trained_pieces(ctx: Context) -> list[LocalShard]:
    trained = {name for name, parameter in named_parameters(ctx.model) if parameter.requires_grad}
    return [piece for piece in parameter_shards(ctx.model) if piece.name in trained]


def _signal_to_noise(ctx: Context) -> DeviceScalars:
    """Compute the ratio from the optimizer's running means, where it has them."""
    betas = {id(each): group.get("betas") for group in ctx.optimizer.param_groups for each in group["params"]}
    has_means = any(state.keys() >= _KINDS for state in ctx.optimizer.state.values())
    means: list[LocalShard] = []
    squares: list[LocalShard] = []
    starts: list[Tensor] = []  # bias corrections of the squared mean and of the mean square
    trained = {piece.name: piece for piece in _trained_pieces(ctx)}
    for name, parameter in named_parameters(ctx.model):
        state = ctx.optimizer.state.get(parameter, {})
        is_here = state.keys() >= _KINDS
        is_on_some_stage = place_of(parameter) is not None and has_means
        if name not in trained or not betas.get(id(parameter)) or not (is_here or is_on_some_stage):
            continue
        beta1, beta2 = betas[id(parameter)]  # type: ignore[misc]
        # 1 - 0.999^step has few digits in fp32.
        step = accelerator.wide(torch.as_tensor(state["step"] if is_here else 1))
        starts.append(torch.stack([(1 - beta1**step) ** 2, 1 - beta2**step]))
        mean, square = state.get("exp_avg", _NOTHING), state.get("exp_avg_sq", _NOTHING)
        means.append(LocalShard(name, own_part(parameter, mean), trained[name].groups))
        squares.append(LocalShard(name, own_part(parameter, square), trained[name].groups))
    if not means:
        return DeviceScalars([], torch.zeros(0))
    measured = torch.stack([squared_norms([each.local for each in means]), _sums([each.local for each in squares])], 1)
    corrected = measured / torch.stack(starts).to(measured.device)  # before the sum: another stage knows its own steps
    signal, power = summed(corrected, [each.groups for each in means]).T
    return DeviceScalars([piece.name for piece in means], signal / (power - signal).clamp(min=0))


def _sums(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.sum(dtype=accelerator.wide_dtype(tensor.device)) for tensor in tensors])
