"""WeightAverages: base class of callbacks that average the weights; the averages can be swapped into the model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dalsegno.distributed.sharded_tensors import named_parameters
from dalsegno.distributed.stage_places import is_on_other_stage, like_parameter
from dalsegno.errors import ConfigurationError
from dalsegno.events import FlaglessCallback, contexts

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
        self._weights = [_part(parameters[name]) for name in here]
        self._local = [_part(average) for average in here.values()]
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
    _part(average).copy_(_part(parameter))
    return like_parameter(average, parameter)


def _part(tensor: Tensor) -> Tensor:
    """Return this rank's shard, sharing memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
