"""Averages of a model's weights, sharded like the weights, which can be swapped into the model.

The callback that owns an :class:`Averages` decides when to update it, and with which weight.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dalsegno.distributed import accelerator
from dalsegno.distributed.sharded_tensors import named_parameters
from dalsegno.distributed.stage_places import is_on_other_stage, like_parameter
from dalsegno.errors import ConfigurationError
from dalsegno.events.contexts import EvaluateBeginContext

logger = logging.getLogger("dalsegno")


_in_place: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Key of the callback whose averages are swapped into a model: one callback at a time."""


def name_evaluated_weights(ctx: EvaluateBeginContext) -> None:
    """Make the records of an evaluation name the averages that are swapped in, of any callback."""
    ctx.evaluated_weights = _in_place.get(ctx.model, ctx.evaluated_weights)


class Averages:
    """Averages of all trained parameters, a tied one once; in fp32 for parameters of fewer than 32 bits.

    Tensors are allocated by :meth:`expect` or :meth:`begin`, not before.
    """

    def __init__(self) -> None:
        self._averages: dict[str, Tensor] = {}
        self._unbegun: set[str] = set()  # averages without a value yet
        self._model: nn.Module | None = None
        self._weights: list[Tensor] = []  # this rank's shard of each parameter, and of its average
        self._local: list[Tensor] = []
        self._parameters: list[nn.Parameter] = []  # of the model
        self._followed: list[bool] = []  # which of them have an average
        self._kept: list[Tensor] | None = None  # the weights, while the averages are swapped in

    @property
    def have_begun(self) -> bool:
        """Whether averages are bound to a model."""
        return self._model is not None

    def follow(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the averages by name; before they are bound, those of :meth:`expect`."""
        return self._averages if self._model is model else self.expect(model)

    def expect(self, model: nn.Module) -> dict[str, Tensor]:
        """Return an average for each parameter that is now trained, by name, to be restored. A new one has no valid
        value yet; if the parameters are others than those before, :meth:`begin` binds them."""
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

    def note_restored(self, names: Collection[str]) -> None:
        """Note that the averages of these names have been restored from a checkpoint."""
        self._unbegun -= set(names)

    def begin(self, model: nn.Module, key: str, *, were_saved: bool) -> None:
        """Bind the averages to the model; initialize new ones with the weights.

        Args:
            model: whose parameters are averaged.
            key: of the callback, for the warning.
            were_saved: whether averages have been restored. A new one then lacks its past: that is logged, and it
                begins with the next update, as that of a parameter which is trained only since the save.
        """
        if self._model is not model:
            self.expect(model)
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
            logger.warning(
                "%s: no average was saved of %d parameter(s), %s among them; theirs start from the current weights",
                key,
                len(begun),
                min(begun),
            )

    def follow_trained(self, model: nn.Module, key: str) -> None:
        """Begin averages of parameters that are trained only now, with the weights; end those of frozen ones. To be
        called before each update."""
        if [each.requires_grad for each in self._parameters] != self._followed:
            self._model = None
            self.begin(model, key, were_saved=False)

    def end(self) -> None:
        """Release all tensors."""
        self._averages, self._unbegun, self._model, self._weights, self._local = {}, set(), None, [], []
        self._parameters, self._followed = [], []

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
        """Swap the averages into the model, for the callback of this key. Must be entered on all ranks.

        Raises:
            ConfigurationError: if averages are already swapped in, as in an evaluation; or if there are none.
        """
        if self._model is None:
            raise ConfigurationError(f"{key}.averaged(): there is no average yet; call train() first")
        if not self.put_in_place(key):
            there = _in_place[self._model]
            raise ConfigurationError(f"{key}.averaged(): the averages of {there} are swapped in already")
        try:
            yield
        finally:
            self.take_back()

    @torch.no_grad()
    def put_in_place(self, key: str) -> bool:
        """Copy the averages into the model, unless others are there; keep the weights. Returns whether it did."""
        if self._model is None or self._model in _in_place:
            return False
        accelerator.synchronize(self._weights)  # a save may still be copying these weights on another stream
        self._kept = [weight.clone() for weight in self._weights]
        _in_place[self._model] = key
        if self._weights:
            torch._foreach_copy_(self._weights, self._local)
        return True

    @torch.no_grad()
    def take_back(self) -> None:
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
