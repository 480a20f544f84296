"""EMA and ModelMerge: averages of the weights, which can be swapped into the model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypedDict
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dalsegno.callbacks.argument_checks import flag, number, whole
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import local_part, named_parameters
from dalsegno.distributed.stage_places import is_on_other_stage, like_parameter
from dalsegno.errors import ConfigurationError
from dalsegno.events import FlaglessCallback, contexts
from dalsegno.stateful.schema import Count

logger = logging.getLogger("dalsegno")

_in_place: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Key of the callback whose averages are swapped into a model: one callback at a time."""


class WeightAverages(FlaglessCallback):
    """Averages of all trained parameters, a tied one once; in fp32 for parameters of fewer than 32 bits.

    They are sharded like the weights. Tensors are allocated by :meth:`_expect` or :meth:`_bind`, not before. A subclass
    decides when to update them, and with which weight.
    """

    background_safe = False

    def __init__(self, name: str | None) -> None:
        self.name = name
        self._averages: dict[str, Tensor] = {}
        self._unbegun: set[str] = set()  # averages without a value yet
        self._model: nn.Module | None = None  # that the averages are bound to
        self._weights: list[Tensor] = []  # this rank's shard of each parameter, and of its average
        self._local: list[Tensor] = []
        self._parameters: list[nn.Parameter] = []  # of the model
        self._followed: list[bool] = []  # which of them have an average
        self._kept: list[Tensor] | None = None  # the weights, while the averages are swapped in

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap the averages into the model: ``with ema.averaged():``. Must be entered on all ranks. Raises
        ConfigurationError if there are none yet, or if averages of any callback are swapped in, as in an evaluation."""
        if self._model is None:
            raise ConfigurationError(f"{self.key}.averaged(): there is no average yet; call train() first")
        if not self._put_in_place():
            there = _in_place[self._model]
            raise ConfigurationError(f"{self.key}.averaged(): the averages of {there} are swapped in already")
        try:
            yield
        finally:
            self._take_back()

    def on_evaluate_begin(self, ctx: contexts.EvaluateBeginContext) -> None:
        """Make the records of the evaluation name the averages that are swapped in, of any callback."""
        ctx.evaluated_weights = _in_place.get(ctx.model, ctx.evaluated_weights)

    def _follow(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the averages by name; before they are bound, those of :meth:`_expect`."""
        return self._averages if self._model is model else self._expect(model)

    def _expect(self, model: nn.Module) -> dict[str, Tensor]:
        """Return an average for each parameter that is now trained, by name. A new one has no valid value until it is
        restored, or :meth:`_bind` binds it."""
        trained = {name: each for name, each in named_parameters(model) if each.requires_grad}
        if trained.keys() != self._averages.keys():
            self._model = None
        for name, parameter in trained.items():
            known = self._averages.get(name)
            if known is None or known.shape != parameter.shape:
                self._averages[name] = _like(parameter)
                self._unbegun.add(name)
        self._averages = {name: self._averages[name] for name in trained}
        self._unbegun &= trained.keys()
        return self._averages

    def _bind(self, model: nn.Module, *, were_saved: bool) -> None:
        """Bind the averages to the model; initialize new ones with the weights.

        ``were_saved``: averages have been restored. A new one lacks its past: that is logged, and it begins with the
        next update.
        """
        if self._model is not model:
            self._expect(model)
        begun, self._unbegun = self._unbegun, set()
        if were_saved:
            self._averages = {name: each for name, each in self._averages.items() if name not in begun}
        parameters = dict(named_parameters(model))
        self._model = model
        here = {name: average for name, average in self._averages.items() if not is_on_other_stage(average)}
        self._weights = [local_part(parameters[name].detach()) for name in here]
        self._local = [local_part(average) for average in here.values()]
        self._parameters, self._followed = [*parameters.values()], [name in self._averages for name in parameters]
        for name, weight, average in zip(here, self._weights, self._local, strict=True):
            if name in begun:
                average.copy_(weight)
        if begun and were_saved:
            text = "%s: no average was saved of %d parameter(s), %s among them; theirs start from the current weights"
            logger.warning(text, self.key, len(begun), min(begun))

    def _release(self) -> None:
        self._averages, self._unbegun, self._model, self._weights, self._local = {}, set(), None, [], []
        self._parameters, self._followed = [], []

    @torch.no_grad()
    def _approach(self, model: nn.Module, share: float) -> None:
        """``average ← average + share · (weights − average)``, for a share from 0 to 1.

        Averages of parameters that are trained only now begin with the weights; those of frozen ones end.
        """
        if [each.requires_grad for each in self._parameters] != self._followed:
            self._model = None
            self._bind(model, were_saved=False)
        weights = [
            weight if weight.dtype == average.dtype else weight.to(average.dtype)
            for weight, average in zip(self._weights, self._local, strict=True)
        ]
        if weights:
            torch._foreach_lerp_(self._local, weights, share)

    @torch.no_grad()
    def _put_in_place(self) -> bool:
        """Copy the averages into the model, unless others are there; keep the weights. Returns whether it did."""
        if self._model is None or self._model in _in_place:
            return False
        self._kept = [weight.clone() for weight in self._weights]
        _in_place[self._model] = self.key
        if self._weights:
            torch._foreach_copy_(self._weights, self._local)
        return True

    @torch.no_grad()
    def _take_back(self) -> None:
        """Restore the weights."""
        kept, self._kept = self._kept, None
        if kept:
            torch._foreach_copy_(self._weights, kept)
        if kept is not None and self._model is not None:
            del _in_place[self._model]


def _like(parameter: Tensor) -> Tensor:
    """Return a tensor for a parameter's average, sharded like the parameter."""
    small = parameter.is_floating_point() and parameter.dtype.itemsize < torch.float32.itemsize
    average = torch.empty_like(parameter, dtype=torch.float32 if small else parameter.dtype, requires_grad=False)
    local_part(average).copy_(local_part(parameter.detach()))
    return like_parameter(average, parameter)


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


class ModelMergeState(TypedDict):
    merge_step: Count
    merged: Count


class ModelMerge(WeightAverages):
    """Averages the weights of the last ``window`` steps up to a merge step, for that step's checkpoint.

    Covers the same parameters as ``EMA``; the means are sharded, saved and resharded like its averages, and
    ``export_model(..., average="ModelMerge")`` writes them. Tensors are allocated when the first window begins, and
    replaced when the next one does. Training and evaluations use the weights themselves; ``with merge.averaged():``
    swaps in the merged ones. Windows must not overlap, since there is one mean at a time, and a checkpoint must be due
    at each merge step.

    Args:
        steps: one or several merge steps. None: the run's last step.
        window: number of steps up to a merge step, including it, that are averaged; fewer if the run has fewer.
        every: steps between averaged steps; a merge step is always averaged.
        name: the callback's key, and the merged weights' name in checkpoints; None: the class's name.
    """

    state_schema = ModelMergeState

    def __init__(
        self, steps: int | Sequence[int] | None = None, window: int = 100, *, every: int = 1, name: str | None = None
    ) -> None:
        super().__init__(name)
        self._window = whole("ModelMerge", "window", window)
        self._every = whole("ModelMerge", "every", every)
        if every > window:
            raise ConfigurationError(f"ModelMerge: every={every!r}; needs an integer up to the window's {window}")
        self._steps = None if steps is None else _merge_steps(steps, window)
        self._last_step = 0  # of the run
        self._merge_step = 0  # end of the window of the present means; 0: there are none
        self._merged = 0  # number of steps in the present means

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        last, saving = ctx.state.max_steps, ctx.args.saving
        if self._steps is None and last < 1:
            raise ConfigurationError(
                "ModelMerge: the run's last step is unknown; set max_steps=, or ModelMerge(steps=)"
            )
        self._last_step = last
        for step in self._steps or []:
            if step != last and not saving.at_step(step):
                raise ConfigurationError(
                    f"ModelMerge: steps={step}, but no checkpoint is saved there to contain the merged weights; add "
                    f"AtSteps({step}) to save=, or choose another step"
                )

    def on_load(self, ctx: contexts.Context) -> None:
        if self._merged:
            self._bind(ctx.model, were_saved=True)

    on_rollback = on_load

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        merge_step = self._merge_step_of(ctx.step)
        if merge_step is None or (merge_step - ctx.step) % self._every:
            return
        if merge_step != self._merge_step:
            self._release()
            self._merge_step, self._merged = merge_step, 0
        if self._model is None:
            self._bind(ctx.model, were_saved=self._merged > 0)
        self._merged += 1
        self._approach(ctx.model, 1 / self._merged)
        if ctx.step == merge_step:
            self._report()

    def sharded_state(self, model: nn.Module) -> tuple[dict[str, Tensor], ModelMergeState]:
        """Return the means by parameter name; none before the first window."""
        rest: ModelMergeState = {"merge_step": self._merge_step, "merged": self._merged}
        return self._follow(model) if self._merged else {}, rest

    def tensors_to_load(self, model: nn.Module, rest: Any) -> dict[str, Tensor]:
        return self._expect(model) if rest["merged"] else {}

    def load_sharded_state(self, names: Collection[str], rest: Any) -> None:
        self._merge_step, self._merged = rest["merge_step"], rest["merged"]
        if self._merged:
            self._unbegun -= set(names)
        else:
            self._release()

    def _merge_step_of(self, step: int) -> int | None:
        """Return the end of the window that contains ``step``; None if none does."""
        steps = [self._last_step] if self._steps is None else self._steps
        return next((end for end in steps if end - self._window < step <= end), None)

    def _report(self) -> None:
        planned = (min(self._window, self._merge_step) - 1) // self._every + 1
        if collectives.rank() == 0:
            level = logging.INFO if self._merged == planned else logging.WARNING
            text = "%s: the mean of %d of %d weights up to step %d is in that step's checkpoint"
            logger.log(level, text, self.key, self._merged, planned, self._merge_step)


def _merge_steps(steps: int | Sequence[int], window: int) -> list[int]:
    """Return the merge steps in order. Raises ConfigurationError if one is not a step, or two windows overlap."""
    several: Any = list(steps) if isinstance(steps, (list, tuple, range)) else [steps]
    if not several:
        raise ConfigurationError(f"ModelMerge: steps={steps!r}; needs a step, or several")
    ordered = sorted({whole("ModelMerge", "steps", step) for step in several})
    for earlier, later in pairwise(ordered):
        if later - earlier < window:
            raise ConfigurationError(
                f"ModelMerge: steps={earlier} and {later} are closer than window={window}; give a second ModelMerge "
                "one of them, with another name"
            )
    return ordered
