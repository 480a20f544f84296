"""Tensors of a callback that are sharded like the model's, such as an average of the weights."""

from __future__ import annotations

from torch import nn

from dalsegno.checkpoint.contract import Captured, LoadTarget, class_name_of, is_dense
from dalsegno.checkpoint.index import Index
from dalsegno.distributed.stage_places import is_on_other_stage, like_parameter
from dalsegno.errors import CannotSave, ConfigurationError
from dalsegno.stateful.component import State, Stateful, TensorHolder, declared_schema, varying_fields
from dalsegno.stateful.schema import check


class CallbackTensors:
    """Tensors of ``holder`` as a component of a checkpoint. One that is missing there, or has another shape, stays
    unchanged; the holder is notified. ``key`` names a directory: ``callbacks.`` and a name without dots or slashes."""

    optimizer = None  # the holder may change its tensors at any time

    def __init__(self, key: str, holder: TensorHolder, model: nn.Module) -> None:
        name = key.partition(".")[2]
        if not name or not name.replace("_", "").replace("-", "").isalnum():
            raise ConfigurationError(
                f"name={name!r}: a callback with sharded_state has a directory of this name in each checkpoint; "
                "allowed are letters, digits, - and _"
            )
        if isinstance(holder, Stateful):
            raise ConfigurationError(
                f"{key}: it has both sharded_state and state_dict; return all of its state from sharded_state"
            )
        self.key = key
        self._holder = holder
        self._model = model

    @property
    def class_name(self) -> str:
        return class_name_of(self._holder)

    @property
    def state_varies(self) -> tuple[str, ...]:
        return varying_fields(self._holder)

    def capture(self) -> Captured:
        tensors, rest = self._holder.sharded_state(self._model)
        for name, tensor in tensors.items():
            if not is_dense(tensor):
                raise CannotSave(f"{self.key}.{name}: needs a dense tensor or DTensor, not a {type(tensor).__name__}")
        return Captured({name: like_parameter(tensor.detach(), tensor) for name, tensor in tensors.items()}, rest)

    def check_rest(self, stored: Index, rest: State, where: str) -> None:
        form = declared_schema(self._holder)
        if form is not None:
            check(rest, form, where)

    def differences(self, stored: Index, rest: State, *, any_dtype: bool = False) -> list[str]:
        return []

    def prepare(self, stored: Index, rest: State) -> LoadTarget:
        there = stored.of(self.key)
        tensors_to_load = getattr(
            self._holder, "tensors_to_load", lambda model, _: self._holder.sharded_state(model)[0]
        )
        fitting = {
            name: tensor.detach()
            for name, tensor in tensors_to_load(self._model, rest).items()
            if name in there and there[name].shape == tensor.shape
        }
        here = {name: tensor for name, tensor in fitting.items() if not is_on_other_stage(tensor)}
        # All ranks are notified of the same names: other stages load those that are elsewhere.
        return LoadTarget(here, lambda: self._holder.load_sharded_state(fitting.keys(), rest))
