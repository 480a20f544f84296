"""Averages of a model's weights: beside each a tensor of its own, spread over the ranks alike, that can take its place.

What is averaged, how often and with which weight is the affair of the callback that holds them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dalsegno.distributed.sharded_tensors import named_parameters
from dalsegno.errors import ConfigurationError
from dalsegno.events.contexts import EvaluateBeginContext

_in_place: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Whose averages are in the place of a model's weights now, by key: one callback's at a time."""


def name_evaluated_weights(ctx: EvaluateBeginContext) -> None:
    """Let the records of an evaluation name the averages that are in place, whoever has put them there."""
    ctx.evaluated_weights = _in_place.get(ctx.model, ctx.evaluated_weights)


class Averages:
    """Of every parameter that is trained, a tied one once; of less than 32 bits in fp32, so that small changes count.

    No tensors are made before they are asked for, by :meth:`follow` or :meth:`begin`.
    """

    def __init__(self) -> None:
        self._averages: dict[str, Tensor] = {}
        self._unbegun: set[str] = set()  # averages that are nothing yet
        self._model: nn.Module | None = None
        self._weights: list[Tensor] = []  # this rank's part of each parameter, and of its average
        self._local: list[Tensor] = []
        self._kept: list[Tensor] | None = None  # the weights, while the averages are in their place

    @property
    def have_begun(self) -> bool:
        """Whether there are any that are bound to a model."""
        return self._model is not None

    def follow(self, model: nn.Module) -> dict[str, Tensor]:
        """One for each parameter that is trained now, by its name; what is in a new one does not count yet."""
        trained = {name: each for name, each in named_parameters(model) if each.requires_grad}
        for name, parameter in trained.items():
            known = self._averages.get(name)
            if known is None or known.shape != parameter.shape:
                self._averages[name] = _like(parameter)
                self._unbegun.add(name)
        self._averages = {name: self._averages[name] for name in trained}
        return self._averages

    def note_restored(self, names: Collection[str]) -> None:
        """In the averages of these names is what a checkpoint had of them."""
        self._unbegun -= set(names)

    def begin(self, model: nn.Module) -> set[str]:
        """Bind them to the weights; those that have not begun begin with these. Returns the names of these."""
        averages = self.follow(model)
        parameters = dict(named_parameters(model))
        self._model = model
        self._weights = [_part(parameters[name]) for name in averages]
        self._local = [_part(average) for average in averages.values()]
        begun, self._unbegun = self._unbegun & averages.keys(), set()
        for name, weight, average in zip(averages, self._weights, self._local, strict=True):
            if name in begun:
                average.copy_(weight)
        return begun

    def end(self) -> None:
        """Let go of all tensors."""
        self._averages, self._unbegun, self._model, self._weights, self._local = {}, set(), None, [], []

    @torch.no_grad()
    def approach(self, share: float) -> None:
        """``average ← average + share · (weights − average)``, for a share from 0 to 1."""
        weights = [
            weight if weight.dtype == average.dtype else weight.to(average.dtype)
            for weight, average in zip(self._weights, self._local, strict=True)
        ]
        if weights:
            torch._foreach_lerp_(self._local, weights, share)

    @contextmanager
    def averaged(self, key: str) -> Iterator[None]:
        """Inside, they are in the weights' place, for the callback of this key. On all ranks.

        Raises:
            ConfigurationError: if any are there already, as in an evaluation; or if there are none.
        """
        if self._model is None or self._model in _in_place:
            there = None if self._model is None else _in_place[self._model]
            what = f"the averages of {there} are in place" if there else "there is no average yet: train() brings it"
            raise ConfigurationError(f"{key}.averaged(): {what}")
        self.put_in_place(key)
        try:
            yield
        finally:
            self.take_back()

    @torch.no_grad()
    def put_in_place(self, key: str) -> bool:
        """Keep the weights aside, and put the averages into the model; not where others are. Whether it is done."""
        if self._model is None or self._model in _in_place:
            return False
        if any(weight.is_cuda for weight in self._weights):
            torch.cuda.synchronize()  # a checkpoint may still be copied from these weights, beside all else
        self._kept = [weight.clone() for weight in self._weights]
        _in_place[self._model] = key
        if self._weights:
            torch._foreach_copy_(self._weights, self._local)
        return True

    @torch.no_grad()
    def take_back(self) -> None:
        """Put the weights into their place again."""
        kept, self._kept = self._kept, None
        if kept:
            torch._foreach_copy_(self._weights, kept)
        if kept is not None and self._model is not None:
            del _in_place[self._model]


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
