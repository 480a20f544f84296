"""LearningDynamics, GradientNoiseScale: relative size of each update, and signal and noise of the gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dalsegno.callbacks.argument_checks import number, whole
from dalsegno.callbacks.loggers.json_logger import RecordCallback
from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.sharded_tensors import (
    DeviceScalars,
    LocalShard,
    PartialSums,
    device_of,
    gradient_shards,
    named_parameters,
    own_part,
    parameter_shards,
    partial_squares,
    read_together,
    squared_norms,
    whole_sums,
)
from dalsegno.errors import ConfigurationError
from dalsegno.events import Event, FlaglessCallback, contexts
from dalsegno.stateful.schema import Finite

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
    for place, piece in enumerate(pieces):
        parameter = parameters[piece.name]
        state = ctx.optimizer.state.get(parameter, {})
        if not (state.keys() >= _KINDS and betas.get(id(parameter))):
            continue
        beta1, beta2 = betas[id(parameter)]  # type: ignore[misc]
        step = accelerator.wide(torch.as_tensor(state["step"]))  # 1 - 0.999^step has few digits in fp32
        starts.append(torch.stack([(1 - beta1**step) ** 2, 1 - beta2**step]))
        numbers.append(place)
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


class NoiseScaleState(TypedDict):
    noise: Finite
    signal: Finite


class GradientNoiseScale(FlaglessCallback):
    """Logs the gradients' noise scale, the batch size beyond which a larger batch gains little, in samples.

    It is ``gradient_noise_scale`` in records of training, the simple noise scale tr(Σ) / |G|²: G is the true gradient
    and Σ the covariance of a single sample's (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training",
    arXiv:1812.06162). Both are estimated, without bias, from the squared norms of the gradients of each rank's first
    micro-batch and of the whole step, before clipping (appendix A.1). A sample's weight is its fraction of the step's
    loss, with any ``loss_weight``. Single estimates scatter widely, so each is averaged exponentially, over the whole
    run and every resume, and the ratio of the averages is logged while it is positive.

    Measures steps with a record. Skips a step with a single micro-batch, and one with NaN or infinity. Refused without
    gradient accumulation; with sharded weights, whose gradients exist on no rank before the reduction; and with
    ``fuse_optim_with_backward``, where they are freed before the end of the step.

    Args:
        decay: factor of the averages at each new estimate, from 0 to below 1.
    """

    state_schema = NoiseScaleState

    def __init__(self, decay: float = 0.95) -> None:
        self._decay = number("GradientNoiseScale", "decay", decay, least=0, under=1)
        self._noise = 0.0  # both begin at zero, a bias that cancels in their ratio
        self._signal = 0.0
        self._factors: list[Tensor] = []
        """For each micro-batch, the factor of its loss in the backward pass. 0-dim."""
        self._first: Tensor | None = None
        """Squared norm of the first micro-batch's gradients, with its factor, if it is not the only one. 0-dim."""
        self._samples = 0
        """Samples of this rank in this step."""

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        if max(ctx.args.accumulation.values.values()) < 2:
            raise ConfigurationError(
                "GradientNoiseScale: needs two micro-batches in a step, to compare the gradients of one and of all: "
                "gradient_accumulation_steps=2 or more, with a smaller per_device_train_batch_size for the same batch"
            )
        if ctx.args.fuse_optim_with_backward:
            raise ConfigurationError(
                "GradientNoiseScale: with fuse_optim_with_backward=True, no gradient is left at the end of the step; "
                "remove one of the two"
            )
        if any(isinstance(parameter, DTensor) for parameter in ctx.model.parameters()):
            raise ConfigurationError(
                "GradientNoiseScale: the weights are sharded, so a rank's own gradients cannot be measured; use "
                "parallel='ddp', say for a few hundred steps of a model that fits, or remove the callback"
            )

    def on_step_begin(self, ctx: contexts.Context) -> None:
        self._factors, self._first, self._samples = [], None, 0

    def on_before_backward(self, ctx: contexts.BackwardContext) -> None:
        if ctx.state.will_log:
            ctx.outputs["loss"].register_hook(self._factors.append)

    def on_microbatch_end(self, ctx: contexts.MicrobatchEndContext) -> None:
        if not ctx.state.will_log:
            return
        self._samples += ctx.samples
        if ctx.is_last:
            self._observe(_squared_norm(ctx.model))
        elif ctx.index == 0 and self._factors:
            self._first = _squared_norm(ctx.model)

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind == "train" and self._signal > 0 and self._noise >= 0:
            ctx.logs["gradient_noise_scale"] = self._noise / self._signal

    def state_dict(self) -> NoiseScaleState:
        return {"noise": self._noise, "signal": self._signal}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._noise, self._signal = state["noise"], state["signal"]

    def _observe(self, whole: Tensor) -> None:
        """Update the averages with a step, by the squared norm of its gradients. Collective; waits for the device.

        A micro-batch whose loss is the fraction p of the step's loss represents b = pN of its N samples, and its
        gradient has E|g|² = |G|² + tr(Σ) / b. The same holds for the step's gradient, with N; and for the mean over
        several micro-batches, weighted by p, with the sum of their b over their number.
        """
        nothing = torch.zeros_like(whole)
        first = (nothing, nothing) if self._first is None else (self._factors[0], self._first)
        here = (whole, sum((each.to(whole) for each in self._factors), nothing), *first)
        square, total, factor, small = torch.stack([each.to(whole) for each in here]).tolist()
        counts = factor > 0  # not where this rank's micro-batch is padding
        own = [square, total, factor, small / factor if counts else 0.0, counts, self._samples]
        square, total, factor, small, several, samples = collectives.sum_floats(own, "the gradients' noise scale")
        ranked = collectives.world_size()  # gradients are averaged over ranks, and then equal on all
        of_step = square / ranked * (ranked / total) ** 2 if total else math.nan
        times = several * total / factor if factor else 1.0  # samples of the step over those of a first micro-batch
        if not times > 1:  # the step has a single micro-batch
            return
        noise = samples * (small / factor - of_step) / (times - 1)
        signal = of_step - noise / samples
        if math.isfinite(noise) and math.isfinite(signal):
            self._noise += (1 - self._decay) * (noise - self._noise)
            self._signal += (1 - self._decay) * (signal - self._signal)


def _squared_norm(model: nn.Module) -> Tensor:
    """Squared norm of all of this rank's gradients as one vector: 0-dim, float64, on the device."""
    gradients = [piece.local for piece in gradient_shards(model) if piece.exists]
    if not gradients:
        device = device_of(model)
        return torch.zeros((), dtype=accelerator.wide_dtype(device), device=device)
    return squared_norms(gradients).sum()
