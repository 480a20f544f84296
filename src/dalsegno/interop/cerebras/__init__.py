"""Cerebras's dialect: the callbacks of the Model Zoo's trainer.

The trainer is each method's first argument; :class:`.trainer.Trainer` stands for it here. :data:`.order.ORDER` is the
whole dialect. Step and batch methods are called for each micro-batch, and the last one's end comes after the update.
``on_train_start`` and ``on_train_end`` are around each stretch of training between validations.

Two things come in another order than there. ``on_enter_fit`` comes after the checkpoint is loaded, so that whatever it
opens is closed again. And a validation belongs to the step whose end asks for it: that step's checkpoint comes after.

State is what ``on_save_checkpoint`` and ``on_save_trainer_state`` put into their dicts. Each callback has dicts of its
own, and is given them back by ``on_load_trainer_state``, ``preprocess_checkpoint`` and ``on_load_checkpoint``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dalsegno.events.adapters import CallbackAdapter
from dalsegno.events.callback import Answer, Binder
from dalsegno.events.table import Event
from dalsegno.stateful.component import State

from .order import ORDER, SILENT
from .shared_state import SharedState

_ROWS = {(row.event, row.method): row for row in ORDER}
_NAMES = {row.method: row.names for row in ORDER if row.names}
_SAVE = ("on_save_checkpoint", "postprocess_checkpoint", "on_save_trainer_state")
_LOAD = ("on_load_trainer_state", "preprocess_checkpoint", "on_load_checkpoint")

_REGISTRY = "GLOBAL_CALLBACK_REGISTRY"  # what their ``with callback:`` fills
_REGISTRIES = ("cerebras.modelzoo.trainer.callbacks", "cerebras.modelzoo.trainer.callbacks.callback")


class Cerebras(CallbackAdapter):
    """A ``Callback`` of the Model Zoo's."""

    dialect = "cerebras"
    packages = ("cerebras",)
    bases = ("Callback", "CoreCallback", "ValidationCallback")
    calls = tuple(_ROWS)
    silent = (*_SAVE, *_LOAD, *SILENT)

    state_rehearsed = False  # on_save_checkpoint is told of a save
    makes_wishes = False  # none but through trainer.early_exit

    def __init__(self, foreign: object, name: str | None = None) -> None:
        self._company: SharedState | None = None
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

    def bound_handlers(self, binder: Binder) -> list[Any]:
        self._company = binder.shared(SharedState)
        self._stacks: dict[str, Any] = {}
        return super().bound_handlers(binder)

    def call(self, event: Event, method: str, binder: Binder) -> Callable[[Any, Any], Answer]:
        company = binder.shared(SharedState)
        return _ROWS[event, method].bind(getattr(self.__wrapped__, method), company, self._stacks)

    def state_methods(self) -> tuple[Callable[[], State], Callable[[State], object]] | None:
        if any(self._defines(method) for method in (*_SAVE, *_LOAD)):
            return self._save, self._load
        return super().state_methods()

    def _save(self) -> State:
        company = self._company
        if company is None or not company.fitting:  # whether it can be saved is tried before: no hook of theirs
            return {}
        state: dict[str, dict[str, Any]] = {"checkpoint": {}, "trainer_state": {}}
        for method in _SAVE:
            self._call(method, company, state["trainer_state" if method.endswith("trainer_state") else "checkpoint"])
        return state

    def _load(self, state: State) -> None:
        assert self._company is not None, "it is bound before anything is loaded"
        for method in _LOAD:
            part = "trainer_state" if method.endswith("trainer_state") else "checkpoint"
            self._call(method, self._company, state.get(part, {}))

    def _call(self, method: str, company: SharedState, state: dict[str, Any]) -> None:
        if self._defines(method):
            getattr(self.__wrapped__, method)(company.trainer, state)


DIALECT = Cerebras
