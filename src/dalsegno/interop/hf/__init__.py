"""Hugging Face's dialect, and Forgather's, which says a little more.

A handler is called as ``on_step_end(args, state, control, **kwargs)``, with what Hugging Face gives as keywords:
``model`` (unwrapped), ``processing_class``, ``optimizer``, ``lr_scheduler``, ``train_dataloader``, ``eval_dataloader``,
and ``logs`` or ``metrics``. One of Forgather's, or one that names the parameter, is given ``trainer`` too; one that
names ``tokenizer``, as they were written until 2024, the processing class.

What their Trainer does around its events happens here too: a record and an evaluation's metrics carry the epoch, and
each record is in ``state.log_history`` before ``on_log``. A leg that begins or ends inside of an epoch begins or ends
that epoch for a callback without state; for one with state, an epoch is begun and ended once, in whichever leg.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dalsegno.events.adapters import CallbackAdapter
from dalsegno.events.callback import Binder
from dalsegno.events.table import Event
from dalsegno.stateful.component import State, Stateful

from .calls import (
    ADDED,
    GIVEN,
    WAYS,
    Call,
    hand_of,
    where_joined,
    where_left,
    without_the_end,
)
from .shared_state import SharedState


class HuggingFace(CallbackAdapter):
    """A ``TrainerCallback`` of Hugging Face's, of Forgather's, or of our own."""

    dialect = "huggingface"
    packages = ("transformers", "forgather", "dalsegno.interop.hf")
    bases = ("TrainerCallback",)
    parameters = ("args", "state", "control")
    background_safe = True
    calls = tuple(WAYS)
    silent = ("on_push_begin",)  # nothing is pushed to a hub

    def arguments(self, method: str) -> tuple[Sequence[str], Sequence[str]]:
        added = (name for (_, called), way in WAYS.items() if called == method for name in ADDED.get(way, ()))
        return ("args", "state", "control"), (*GIVEN, *self._extras(method), *added)

    def overridden_calls(self) -> list[tuple[Event, str]]:
        has_state = isinstance(self, Stateful)
        return [
            call for call in super().overridden_calls() if not (has_state and WAYS[call] in (where_joined, where_left))
        ]

    def call(self, event: Event, method: str, binder: Binder) -> Call:
        company = binder.shared(SharedState)
        context = company.context
        extras = {"trainer": context.trainer, "tokenizer": context.processing_class}
        function = getattr(self.__wrapped__, method)
        if named := {name: extras[name] for name in self._extras(method)}:
            function = partial(function, **named)
        is_default_flow = any(cls.__name__ == "DefaultFlowCallback" for cls in type(self.__wrapped__).__mro__)
        way = without_the_end if is_default_flow and event is Event.STEP_END else WAYS[event, method]
        return way(hand_of(function, company), company)

    def _extras(self, method: str) -> list[str]:
        """What Hugging Face gives to nobody, or to nobody any more."""
        named = inspect.signature(getattr(self.__wrapped__, method)).parameters
        forgather = any(cls.__module__.startswith("forgather.") for cls in type(self.__wrapped__).__mro__)
        return [name for name in ("trainer", "tokenizer") if name in named or (forgather and name == "trainer")]

    def state_methods(self) -> tuple[Callable[[], State], Callable[[State], object]] | None:
        """A ``state_dict`` as Forgather's have it; else what Hugging Face calls an ``ExportableState``."""
        foreign: Any = self.__wrapped__
        own = super().state_methods()
        if own is None and callable(getattr(foreign, "state", None)) and callable(getattr(foreign, "from_state", None)):
            return foreign.state, self._take_back
        return own

    def _take_back(self, state: State) -> None:
        """Into this very object, which keeps the arguments that it is built with now."""
        foreign: Any = self.__wrapped__
        if foreign.from_state.__qualname__ == "ExportableState.from_state":
            restored = state["attributes"]
        else:  # it says itself what its state is made into
            restored = vars(foreign.from_state(state))
        for name, value in restored.items():
            setattr(foreign, name, value)


DIALECT = HuggingFace
