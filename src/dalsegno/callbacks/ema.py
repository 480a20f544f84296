"""EMA: an exponential moving average of the weights, which is what is evaluated."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypedDict

from torch import Tensor, nn

from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import (
    EvaluateBeginContext,
    EvaluateEndContext,
    LoadContext,
    StepEndContext,
    TrainBeginContext,
)
from dalsegno.stateful.schema import Count

from .argument_checks import flag, number, whole
from .averages import Averages, name_evaluated_weights

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
    memory for a copy of the weights while it lasts. Of several of these callbacks the first one's are evaluated. Which
    weights were measured is said in the evaluation's record: ``evaluated_weights`` is this callback's key. Checkpoints
    have the weights that are trained.

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
    background_safe = False
    state_schema = EMAState

    def __init__(self, decay: float = 0.999, *, every: int = 1, warmup: bool = False, name: str | None = None) -> None:
        self.name = name
        self._decay = number("EMA", "decay", decay, least=0)
        if decay >= 1:
            raise ConfigurationError(f"EMA: decay={decay!r}; needs a number below 1: at 1 the average never moves")
        self._every = whole("EMA", "every", every)
        self._warmup = flag("EMA", "warmup", warmup)
        self._updates = 0
        self._averages = Averages()
        self._is_evaluated = False

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside ``with ema.averaged():`` the model has the averages in place of its weights. On all ranks.

        Raises:
            ConfigurationError: if averages are there already, these or another callback's, as in an evaluation; or if
                nothing was restored and no training has begun.
        """
        with self._averages.averaged(self.key):
            yield

    def on_load(self, ctx: LoadContext) -> None:
        self._begin(ctx.model)  # a finished run's averages can be measured, and no training begins there

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self._begin(ctx.model)

    def on_step_end(self, ctx: StepEndContext) -> None:
        if not self._averages.have_begun:  # it came in the middle of a leg
            self._begin(ctx.model)
        if ctx.step % self._every == 0:
            decay = min(self._decay, (1 + self._updates) / (10 + self._updates)) if self._warmup else self._decay
            self._averages.approach(1 - decay)
            self._updates += 1

    def on_evaluate_begin(self, ctx: EvaluateBeginContext) -> None:
        self._is_evaluated = self._averages.put_in_place(self.key)
        name_evaluated_weights(ctx)

    def on_evaluate_end(self, ctx: EvaluateEndContext) -> None:
        if self._is_evaluated:
            self._averages.take_back()
        self._is_evaluated = False

    def sharded_state(self, model: nn.Module) -> tuple[dict[str, Tensor], EMAState]:
        """The averages by the names of their parameters."""
        return self._averages.follow(model), {"updates": self._updates}

    def load_sharded_state(self, names: Collection[str], rest: Any) -> None:
        self._averages.note_restored(names)
        self._updates = rest["updates"]

    def _begin(self, model: nn.Module) -> None:
        begun = self._averages.begin(model)
        if begun and self._updates:
            logger.warning(
                "%s: no average was saved of %d parameter(s), %s among them; theirs begin with the present weights",
                self.key,
                len(begun),
                min(begun),
            )
