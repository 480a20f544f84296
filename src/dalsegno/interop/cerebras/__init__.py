"""Cerebras's dialect: the callbacks of the Model Zoo's trainer.

The trainer is each method's first argument; :class:`.trainer.Trainer` stands in for it. :data:`.order.ORDER` is the
whole dialect. Step and batch methods are called for each micro-batch; the end of the last one comes after the optimizer
step. ``on_train_start`` and ``on_train_end`` enclose each stretch of training between validations.

Two calls come in another order than in the Model Zoo. ``on_enter_fit`` comes after the checkpoint is loaded, so that
what it opens is always closed. A validation belongs to the step at whose end it is due: the checkpoint of that step
is saved after the validation.

The state is what ``on_save_checkpoint``, ``postprocess_checkpoint`` and ``on_save_trainer_state`` put into their dicts.
Each callback has separate dicts, and gets them back in ``on_load_trainer_state``, ``preprocess_checkpoint`` and
``on_load_checkpoint``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dalsegno.errors import ConfigurationError
from dalsegno.events.adapters import CallbackAdapter
from dalsegno.events.callback import Answer, Binder
from dalsegno.events.table import Event
from dalsegno.stateful.component import State

from .base import Callback, Logger
from .deques import decode_deques, encode_deques
from .order import LOG_METRICS, ORDER, SILENT
from .shared_state import SharedState
from .trainer import PACKAGES, is_logger

__all__ = ["DIALECT", "Callback", "Cerebras", "Logger"]

_ROWS = {(row.event, row.method): row for row in ORDER}
_NAMES = {row.method: row.names for row in ORDER if row.names}
_SAVE = ("on_save_checkpoint", "postprocess_checkpoint", "on_save_trainer_state")
_LOAD = ("on_load_trainer_state", "preprocess_checkpoint", "on_load_checkpoint")

_INSTEAD = {
    "Checkpoint": "set save_steps=, or save=",
    "KeepNCheckpoints": "set save_total_limit=, or keep=Latest(n)",
    "SaveCheckpointState": "export the model of a checkpoint: dalsegno checkpoints export",
    "LoadCheckpointStates": "pass load_components= to train()",
    "Lora": "wrap the model before it is passed to the Trainer, e.g. with peft",
    "SamplesStreamedInfo": "use dalsegno.callbacks.SamplesStreamedInfo",
}
"""The library's callbacks that work on its own checkpoint files, model or loader, and what to use here."""

_REGISTRY = "GLOBAL_CALLBACK_REGISTRY"  # filled by the library's ``with callback:``
_REGISTRIES = ("cerebras.modelzoo.trainer.callbacks", "cerebras.modelzoo.trainer.callbacks.callback")


class Cerebras(CallbackAdapter):
    """Adapts a ``Callback`` of the Model Zoo."""

    dialect = "cerebras"
    packages = PACKAGES
    bases = ("Callback", "CoreCallback", "ValidationCallback", "Logger")
    calls = tuple(_ROWS)
    silent = (*_SAVE, *_LOAD, *SILENT)

    state_rehearsed = False  # on_save_checkpoint must be called for real saves only
    sets_control_flags = False  # except through trainer.early_exit, which SharedState polls

    def __init__(self, foreign: object, name: str | None = None) -> None:
        self._shared: SharedState | None = None
        for cls in type(foreign).__mro__:
            if cls.__name__ in _INSTEAD and cls.__module__.startswith("cerebras."):
                raise ConfigurationError(
                    f"{cls.__name__} needs the checkpoint files, the model or the loader of Cerebras's own trainer; "
                    f"instead, {_INSTEAD[cls.__name__]}"
                )
        super().__init__(foreign, name)
        for method in (*_SAVE, *_LOAD):
            if self._defines(method):
                self._check_signature(method)

    @classmethod
    def registered_globally(cls) -> Iterable[object]:
        modules = [sys.modules[name] for name in _REGISTRIES if name in sys.modules]
        held = {id(each): each for module in modules for each in getattr(module, _REGISTRY, {}).values()}
        return held.values()

    def arguments(self, method: str) -> tuple[Sequence[str], Sequence[str]]:
        return _NAMES.get(method, ("trainer", "state_dict")), ()

    def overridden_calls(self) -> list[tuple[Event, str]]:
        logs = is_logger(self.__wrapped__)
        return [call for call in super().overridden_calls() if logs or call[1] != LOG_METRICS]

    def bound_handlers(self, binder: Binder) -> list[Any]:
        self._shared = binder.shared(SharedState)
        self._stacks: dict[str, Any] = {}
        return super().bound_handlers(binder)

    def call(self, event: Event, method: str, binder: Binder) -> Callable[[Any, Any], Answer]:
        shared = binder.shared(SharedState)
        return _ROWS[event, method].bind(getattr(self.__wrapped__, method), shared, self._stacks)

    def state_methods(self) -> tuple[Callable[[], State], Callable[[State], object]] | None:
        if any(self._defines(method) for method in (*_SAVE, *_LOAD)):
            return self._save, self._load
        return super().state_methods()

    def _save(self) -> State:
        shared = self._shared
        if shared is None or not shared.fitting:  # a trial of whether the state can be saved must not call their hooks
            return {}
        state: dict[str, dict[str, Any]] = {"checkpoint": {}, "trainer_state": {}}
        for method in _SAVE:
            self._call(method, shared, state["trainer_state" if method.endswith("trainer_state") else "checkpoint"])
        saved: State = encode_deques(state)
        return saved

    def _load(self, state: State) -> None:
        assert self._shared is not None, "bound_handlers() is called before a checkpoint is loaded"
        state = decode_deques(state)
        for method in _LOAD:
            part = "trainer_state" if method.endswith("trainer_state") else "checkpoint"
            self._call(method, self._shared, state.get(part, {}))

    def _call(self, method: str, shared: SharedState, state: dict[str, Any]) -> None:
        if self._defines(method):
            getattr(self.__wrapped__, method)(shared.trainer, state)


DIALECT = Cerebras
