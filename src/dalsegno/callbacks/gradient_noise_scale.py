"""GradientNoiseScale: up to which batch size a larger batch makes training faster."""

from __future__ import annotations

import math
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import device_of, gradient_shards, squared_norms
from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import (
    BackwardContext,
    Context,
    LogContext,
    MicrobatchEndContext,
    TrainBeginContext,
)
from dalsegno.stateful.schema import Finite

from .argument_checks import number


class NoiseScaleState(TypedDict):
    noise: Finite
    signal: Finite


class GradientNoiseScale(Callback):
    """Adds the simple noise scale of the gradients, in samples, to records of training as ``gradient_noise_scale``:

        B_simple = tr(Σ) / |G|²

    G is the true gradient and Σ the covariance of a single sample's (McCandlish et al. 2018, "An Empirical Model of
    Large-Batch Training", arXiv:1812.06162). A batch much smaller than that is mostly noise, so that twice the batch
    needs about half the steps; one much larger gains little.

    Both are estimated, without bias, from the squared norms of gradients over few samples and over many (appendix A.1):
    of each rank's first micro-batch, and of the whole step, before clipping. A sample's weight is the part of the
    step's loss that it has in fact, whatever ``loss_weight`` says. The estimates of single steps scatter widely, and
    |G|² may even come out negative; so each is averaged exponentially, and what is logged is the ratio of the averages:
    of the run from its beginning, over every resume, and nothing as long as it is not positive.

    It looks at steps that are logged, and needs two micro-batches in them: an epoch's last step may have only one, and
    is passed over, as is one with NaN or infinity. Other steps cost nothing, and no copy of a gradient is kept.

    Args:
        decay: what is left of the averages at each estimate, from 0 to below 1.

    Raises:
        ConfigurationError: for a value that cannot work. When training begins: without gradient accumulation; with
            sharded weights, whose gradients exist on no rank before they are summed over all; or with
            ``fuse_optim_with_backward``, where they are gone by the end of the step.
    """

    makes_wishes = False

    state_schema = NoiseScaleState

    def __init__(self, decay: float = 0.95) -> None:
        self._decay = number("GradientNoiseScale", "decay", decay, least=0, under=1)
        self._noise = 0.0  # both begin at zero, which does not show in their ratio
        self._signal = 0.0
        self._factors: list[Tensor] = []
        """Of each micro-batch: by what its loss was multiplied before the backward pass. 0-dim."""
        self._first: Tensor | None = None
        """The squared norm of the first one's gradients, multiplied so, if more came after it. 0-dim."""
        self._samples = 0
        """Of this rank, in this step."""

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        _refuse_what_cannot_be_measured(ctx)

    def on_step_begin(self, ctx: Context) -> None:
        self._factors, self._first, self._samples = [], None, 0

    def on_before_backward(self, ctx: BackwardContext) -> None:
        if ctx.state.will_log:
            ctx.outputs["loss"].register_hook(self._factors.append)

    def on_microbatch_end(self, ctx: MicrobatchEndContext) -> None:
        if not ctx.state.will_log:
            return
        self._samples += ctx.samples
        if ctx.is_last:
            self._observe(_squared_norm(ctx.model))
        elif ctx.index == 0 and self._factors:
            self._first = _squared_norm(ctx.model)

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind == "train" and self._signal > 0 and self._noise >= 0:
            ctx.logs["gradient_noise_scale"] = self._noise / self._signal

    def state_dict(self) -> NoiseScaleState:
        return {"noise": self._noise, "signal": self._signal}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._noise, self._signal = state["noise"], state["signal"]

    def _observe(self, whole: Tensor) -> None:
        """Take in a step, by the squared norm of its gradients. Collective; waits for the device.

        A micro-batch whose loss is the part p of the step's stands for b = pN of its N samples, and its gradient has
        E|g|² = |G|² + tr(Σ) / b. So has that of the step, with N; and the mean over several, weighted by p, with the
        sum of their b over their number.
        """
        nothing = torch.zeros_like(whole)
        first = (nothing, nothing) if self._first is None else (self._factors[0], self._first)
        here = (whole, sum((each.to(whole) for each in self._factors), nothing), *first)
        square, total, factor, small = torch.stack([each.to(whole) for each in here]).tolist()
        counts = factor > 0  # the other ranks' may, where this rank's is padding
        own = [square, total, factor, small / factor if counts else 0.0, counts, self._samples]
        square, total, factor, small, several, samples = collectives.sum_floats(own, "the gradients' noise scale")
        ranked = collectives.world_size()  # gradients are averaged over them, and equal on all when that is done
        of_step = square / ranked * (ranked / total) ** 2 if total else math.nan
        times = several * total / factor if factor else 1.0  # as many samples are in the step as in a first micro-batch
        if not times > 1:  # there was no first one that others followed
            return
        noise = samples * (small / factor - of_step) / (times - 1)
        signal = of_step - noise / samples
        if math.isfinite(noise) and math.isfinite(signal):
            self._noise += (1 - self._decay) * (noise - self._noise)
            self._signal += (1 - self._decay) * (signal - self._signal)


def _squared_norm(model: nn.Module) -> Tensor:
    """Of all gradients that lie here, as one vector: 0-dim, float64, on the device."""
    gradients = [piece.local for piece in gradient_shards(model) if piece.exists]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device_of(model))
    return squared_norms(gradients).sum()


def _refuse_what_cannot_be_measured(ctx: Context) -> None:
    if ctx.args.gradient_accumulation_steps < 2:
        raise ConfigurationError(
            "GradientNoiseScale: needs two micro-batches in a step, to compare the gradients of one and of all: "
            "gradient_accumulation_steps=2 or more, with a smaller per_device_train_batch_size for the same batch"
        )
    if ctx.args.fuse_optim_with_backward:
        raise ConfigurationError(
            "GradientNoiseScale: with fuse_optim_with_backward=True no gradient is left when a step's are all there; "
            "do without one of the two"
        )
    if any(isinstance(parameter, DTensor) for parameter in ctx.model.parameters()):
        raise ConfigurationError(
            "GradientNoiseScale: the weights are sharded, and a rank's own gradients are not there to be measured; "
            "use parallel='ddp', for a few hundred steps of a model that fits, say, or do without"
        )
