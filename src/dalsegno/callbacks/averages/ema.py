"""EMA: an exponential moving average of the weights, used in evaluations."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypedDict

from torch import Tensor, nn

from dalsegno.callbacks.argument_checks import flag, number, whole
from dalsegno.callbacks.averages.averaged_weights import WeightAverages
from dalsegno.errors import ConfigurationError
from dalsegno.events import contexts
from dalsegno.stateful.schema import Count


class EMAState(TypedDict):
    updates: Count


class EMA(WeightAverages):
    """Keeps an exponential moving average of the weights, which evaluations use.

    After each update, ``average ← decay · average + (1 − decay) · weights``. Averages start at the run's first weights,
    and cover all trained parameters, a tied one once; those of fewer than 32 bits are averaged in fp32. Buffers are not
    averaged. Averages are sharded, saved and resharded like the weights; ``export_model(..., average="EMA")`` writes
    them. An evaluation swaps them into the model and restores the weights afterwards, also after an exception; its
    record has ``evaluated_weights``, this callback's key. With several such callbacks, the first one's are evaluated.

    Args:
        decay: factor of the average at each update, from 0 to below 1. Averages over about 1 / (1 − decay) updates.
        every: steps between updates.
        warmup: the n-th update (from 0) uses ``min(decay, (1 + n) / (10 + n))``, so that the first weights soon lose
            their influence.
        name: the callback's key, and the averages' name in checkpoints; None: the class's name.
    """

    state_schema = EMAState

    def __init__(self, decay: float = 0.999, *, every: int = 1, warmup: bool = False, name: str | None = None) -> None:
        super().__init__(name)
        self._decay = number("EMA", "decay", decay, least=0)
        if decay >= 1:
            raise ConfigurationError(f"EMA: decay={decay!r}; needs a number below 1: at 1 the average never moves")
        self._every = whole("EMA", "every", every)
        self._warmup = flag("EMA", "warmup", warmup)
        self._updates = 0
        self._is_evaluated = False

    def _begin(self, ctx: contexts.Context) -> None:
        self._bind(ctx.model, were_saved=self._updates > 0)

    on_train_begin = _begin
    on_rollback = _begin
    on_load = _begin  # so that a finished run's averages can be evaluated: it begins no training

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        if self._model is None:  # added in the middle of a leg
            self._begin(ctx)
        if ctx.step % self._every == 0:
            decay = min(self._decay, (1 + self._updates) / (10 + self._updates)) if self._warmup else self._decay
            self._approach(ctx.model, 1 - decay)
            self._updates += 1

    def on_evaluate_begin(self, ctx: contexts.EvaluateBeginContext) -> None:
        self._is_evaluated = self._put_in_place()
        super().on_evaluate_begin(ctx)

    def on_evaluate_end(self, ctx: contexts.EvaluateEndContext) -> None:
        if self._is_evaluated:
            self._take_back()
        self._is_evaluated = False

    def sharded_state(self, model: nn.Module) -> tuple[dict[str, Tensor], EMAState]:
        return self._follow(model), {"updates": self._updates}

    def tensors_to_load(self, model: nn.Module, rest: Any) -> dict[str, Tensor]:
        return self._expect(model)

    def load_sharded_state(self, names: Collection[str], rest: Any) -> None:
        self._unbegun -= set(names)
        self._updates = rest["updates"]
