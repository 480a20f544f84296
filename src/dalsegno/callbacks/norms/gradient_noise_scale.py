"""GradientNoiseScale: the batch size up to which a larger batch makes training faster."""

from __future__ import annotations

import math
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dalsegno.callbacks.argument_checks import number
from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.sharded_tensors import device_of, gradient_shards, squared_norms
from dalsegno.errors import ConfigurationError
from dalsegno.events import FlaglessCallback, contexts
from dalsegno.stateful.schema import Finite


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
