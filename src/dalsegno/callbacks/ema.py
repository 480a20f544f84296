"""EMA: an exponential moving average of the weights, which is what is evaluated."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dalsegno.callback import Callback
from dalsegno.contexts import (
    EvaluateBeginContext,
    EvaluateEndContext,
    LoadContext,
    StepEndContext,
    TrainBeginContext,
)
from dalsegno.errors import ConfigurationError
from dalsegno.pieces import named_parameters
from dalsegno.schema import Count

from .arguments import flag, number, whole

logger = logging.getLogger("dalsegno")


class EMAState(TypedDict):
    """What is saved beside the averages."""

    updates: Count


class EMA(Callback):
    """Keeps ``average ← decay · average + (1 − decay) · weights``, and has the averages evaluated.

    The average begins with the weights that the run begins with. It is taken of every parameter that is trained, of a
    tied one once; parameters of less than 32 bits are averaged in fp32, where small changes do not get lost. Buffers
    (running statistics) are not averaged: an evaluation uses the model's present ones.

    Averages are spread over the ranks as the weights are: under FSDP2 each rank has those of its shards. They lie in
    each checkpoint beside the model, and follow it to any number of ranks; ``export_model(..., average="EMA")`` writes
    them. In an evaluation they take the weights' place, which come back afterwards, whatever happens in it; that takes
    memory for a copy of the weights while it lasts. Checkpoints have the weights that are trained.

    The average itself goes back to Polyak and Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging";
    with exponential weights, to Kingma and Ba 2015, "Adam" (arXiv:1412.6980), section 7.2. The warm-up is that of
    TensorFlow's ``ExponentialMovingAverage``.

    Args:
        decay: what is left of the average at each update, 0 to 1. It looks back over about 1 / (1 − decay) updates.
        every: steps from one update to the next.
        warmup: let the n-th update (from 0) use ``min(decay, (1 + n) / (10 + n))``, so that the first weights are soon
            forgotten.
        name: the callback's key, and the averages' name in checkpoints; the class's name if None.

    Raises:
        ConfigurationError: for a value that cannot work.
    """

    makes_wishes = False
    observes = False
    state_schema = EMAState

    def __init__(self, decay: float = 0.999, *, every: int = 1, warmup: bool = False, name: str | None = None) -> None:
        self.name = name
        self._decay = number("EMA", "decay", decay, least=0)
        if decay >= 1:
            raise ConfigurationError(f"EMA: decay={decay!r}; needs a number below 1: at 1 the average never moves")
        self._every = whole("EMA", "every", every)
        self._warmup = flag("EMA", "warmup", warmup)
        self._updates = 0
        self._averages: dict[str, Tensor] = {}
        self._unbegun: set[str] = set()  # averages that are nothing yet
        self._weights: list[Tensor] = []  # this rank's part of each parameter, and of its average
        self._local: list[Tensor] = []
        self._kept: list[Tensor] | None = None  # the weights, while the averages are in their place

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside ``with ema.averaged():`` the model has the averages in place of its weights. On all ranks.

        Raises:
            ConfigurationError: if it is so already, as in an evaluation; or if nothing was restored and no
                training has begun.
        """
        if self._kept is not None or not self._weights:
            what = "there is no average before train()" if not self._weights else "the averages are in place"
            raise ConfigurationError(f"EMA.averaged(): {what}")
        self._swap_in()
        try:
            yield
        finally:
            self._swap_back()

    def on_load(self, ctx: LoadContext) -> None:
        self._begin(ctx.model)  # a finished run's averages can be measured, and no training begins there

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self._begin(ctx.model)

    def on_step_end(self, ctx: StepEndContext) -> None:
        if not self._weights:  # it came in the middle of a leg
            self._begin(ctx.model)
        if ctx.step % self._every == 0:
            self._update()

    def on_evaluate_begin(self, ctx: EvaluateBeginContext) -> None:
        if self._kept is None and self._weights:
            self._swap_in()

    def on_evaluate_end(self, ctx: EvaluateEndContext) -> None:
        self._swap_back()

    def sharded_state(self, model: nn.Module) -> tuple[dict[str, Tensor], Any]:
        """The averages by the names of their parameters."""
        trained = {name: each for name, each in named_parameters(model) if each.requires_grad}
        for name, parameter in trained.items():
            known = self._averages.get(name)
            if known is None or known.shape != parameter.shape:
                self._averages[name] = _like(parameter)
                self._unbegun.add(name)
        self._averages = {name: self._averages[name] for name in trained}
        return self._averages, {"updates": self._updates}

    def load_sharded_state(self, names: Collection[str], rest: Any) -> None:
        self._unbegun -= set(names)
        self._updates = rest["updates"]

    def _begin(self, model: nn.Module) -> None:
        averages, _ = self.sharded_state(model)
        parameters = dict(named_parameters(model))
        self._weights = [_part(parameters[name]) for name in averages]
        self._local = [_part(average) for average in averages.values()]
        unbegun = self._unbegun & averages.keys()
        if unbegun and self._updates:
            logger.warning(
                "%s: no average was saved of %d parameter(s), %s among them; theirs begin with the present weights",
                self.key,
                len(unbegun),
                min(unbegun),
            )
        for name, weight, average in zip(averages, self._weights, self._local, strict=True):
            if name in unbegun:
                average.copy_(weight)
        self._unbegun.clear()

    @torch.no_grad()
    def _update(self) -> None:
        decay = min(self._decay, (1 + self._updates) / (10 + self._updates)) if self._warmup else self._decay
        weights = [
            weight if weight.dtype == average.dtype else weight.to(average.dtype)
            for weight, average in zip(self._weights, self._local, strict=True)
        ]
        if weights:
            torch._foreach_lerp_(self._local, weights, 1 - decay)
        self._updates += 1

    @torch.no_grad()
    def _swap_in(self) -> None:
        if any(weight.is_cuda for weight in self._weights):
            torch.cuda.synchronize()  # a checkpoint may still be copied from these weights, beside all else
        self._kept = [weight.clone() for weight in self._weights]
        if self._weights:
            torch._foreach_copy_(self._weights, self._local)

    @torch.no_grad()
    def _swap_back(self) -> None:
        kept, self._kept = self._kept, None
        if kept:
            torch._foreach_copy_(self._weights, kept)


def _like(parameter: Tensor) -> Tensor:
    """A tensor for a parameter's average, spread over the ranks as it is."""
    small = parameter.is_floating_point() and parameter.dtype.itemsize < torch.float32.itemsize
    average = torch.empty_like(parameter, dtype=torch.float32 if small else parameter.dtype, requires_grad=False)
    _part(average).copy_(_part(parameter))
    return average


def _part(tensor: Tensor) -> Tensor:
    """What this rank has of it: the same memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
