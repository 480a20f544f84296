"""Hugging Face's dialect, and Forgather's, which extends it; in ``bridge``, dalsegno's callbacks in its Trainer.

A handler is called as ``on_step_end(args, state, control, **kwargs)``, with Hugging Face's keyword arguments:
``model`` (unwrapped), ``processing_class``, ``optimizer``, ``lr_scheduler``, ``train_dataloader``, ``eval_dataloader``,
and ``logs`` or ``metrics``. Handlers of Forgather's callbacks, those with a parameter ``trainer``, and those that take
any keyword and belong to a callback based on :class:`TrainerCallback` also get the trainer; those with a
parameter ``tokenizer`` (Hugging Face's name until 2024) also get the processing class under that name. What differs
for Forgather's callbacks is in :mod:`.calls`.

As under Hugging Face's Trainer, a record and an evaluation's metrics contain the epoch, and each record is in
``state.log_history`` before ``on_log``. A leg that begins or ends inside an epoch calls ``on_epoch_begin`` or
``on_epoch_end`` of a stateless callback there; a stateful callback gets each of them once per epoch, over all legs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dalsegno.events.adapters import CallbackAdapter
from dalsegno.events.callback import Binder, Name
from dalsegno.events.table import Event
from dalsegno.interop.hf.calls import (
    ADDED,
    FORGATHER,
    FORGATHER_ADDED,
    KEYWORDS,
    WRAPPERS,
    Call,
    check_uploads,
    if_epoch_joined,
    if_epoch_left,
    ignoring_last_step,
    invoke_with_event,
)
from dalsegno.interop.hf.shared_state import SharedState
from dalsegno.state import Handler
from dalsegno.stateful.component import State, Stateful

_STEP_ENDS = (Event.STEP_END, "on_step_end"), (Event.TRAIN_METRICS, "on_step_end")
"""Where Forgather's ``on_step_end`` is called: after the event, or after ``on_train_metrics``, which precedes it."""


class HuggingFace(CallbackAdapter):
    """Adapts a ``TrainerCallback`` of Hugging Face, of Forgather, or dalsegno's own."""

    dialect = "huggingface"
    packages = ("transformers", "forgather", "trl", "dalsegno.interop.hf")
    bases = ("TrainerCallback",)
    parameters = ("args", "state", "control")
    background_safe = True
    calls = tuple(WRAPPERS)
    silent = ("on_push_begin",)  # dalsegno does not push to a hub
    instead = {
        "SyncRefModelCallback": "run TRL's own trainer with a dalsegno.interop.hf.Bridge",
        "LogCompletionsCallback": "use dalsegno.callbacks.TextgenCallback",
        "WeaveCallback": "use dalsegno.callbacks.TextgenCallback",
    }

    def __init__(self, foreign: object, name: str | None = None) -> None:
        self._is_forgather = any(cls.__module__.startswith("forgather.") for cls in type(foreign).__mro__)
        self._wrappers, self._added = (FORGATHER, FORGATHER_ADDED) if self._is_forgather else (WRAPPERS, ADDED)
        super().__init__(foreign, name)

    def arguments(self, method: str) -> tuple[Sequence[str], Sequence[str]]:
        added = {
            name: None
            for (_, called), wrapper in self._wrappers.items()
            if called == method
            for name in self._added.get(wrapper, ())
        }
        return ("args", "state", "control"), (*KEYWORDS, *self._extras(method), *added)

    def overridden_calls(self) -> list[tuple[Event, str]]:
        has_state = isinstance(self, Stateful)
        unused = _STEP_ENDS[0] if self._is_forgather and self._defines("on_train_metrics") else _STEP_ENDS[1]
        return [
            call
            for call, wrapper in self._wrappers.items()
            if self._defines(call[1])
            and call != unused
            and not (has_state and wrapper in (if_epoch_joined, if_epoch_left))
        ]

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        check_uploads(self.__wrapped__, binder.shared(SharedState).context)
        return super().bound_handlers(binder)

    def call(self, event: Event, method: str, binder: Binder) -> Call:
        shared = binder.shared(SharedState)
        context = shared.context
        extras = {"trainer": context.trainer, "tokenizer": context.processing_class}
        function = getattr(self.__wrapped__, method)
        if named := {name: extras[name] for name in self._extras(method)}:
            function = partial(function, **named)
        is_default_flow = any(cls.__name__ == "DefaultFlowCallback" for cls in type(self.__wrapped__).__mro__)
        wrapper = ignoring_last_step if is_default_flow and event is Event.STEP_END else self._wrappers[event, method]
        return wrapper(invoke_with_event(function, shared), binder)

    def _extras(self, method: str) -> list[str]:
        """The keywords for this method that Hugging Face never passes, or no longer."""
        named = inspect.signature(getattr(self.__wrapped__, method)).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in named.values())
        gets_trainer = self._is_forgather or (isinstance(self.__wrapped__, TrainerCallback) and takes_all)
        return [name for name in ("trainer", "tokenizer") if name in named or (name == "trainer" and gets_trainer)]

    def state_methods(self) -> tuple[Callable[[], State], Callable[[State], object]] | None:
        """Use ``state_dict`` as Forgather does; else Hugging Face's ``ExportableState``."""
        foreign: Any = self.__wrapped__
        own = super().state_methods()
        if own is None and callable(getattr(foreign, "state", None)) and callable(getattr(foreign, "from_state", None)):
            return foreign.state, self._restore
        return own

    def _restore(self, state: State) -> None:
        """Restore the state into the existing object, which keeps its present constructor arguments."""
        foreign: Any = self.__wrapped__
        if foreign.from_state.__qualname__ == "ExportableState.from_state":
            restored = state["attributes"]
        else:  # the class defines from_state itself
            restored = vars(foreign.from_state(state))
        for name, value in restored.items():
            setattr(foreign, name, value)


class TrainerCallback:
    """Base class with Hugging Face's and Forgather's handlers. Override only those that are needed.

    A handler is called with the run's arguments, state and control, under Hugging Face's names, and with the keyword
    arguments ``model``, ``processing_class``, ``optimizer``, ``lr_scheduler``, ``train_dataloader``,
    ``eval_dataloader`` and ``trainer``. It may set flags of the control, or return a changed control. If the class has
    ``state_dict`` and ``load_state_dict``, its state is saved and restored::

        class SaveAtNight(ds.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if datetime.now().hour == 3:
                    control.should_save = True
    """

    name: str | None = Name()  # type: ignore[assignment]
    """Name in messages, and key under which the state is saved: by default the class's name."""

    @property
    def default_name(self) -> str:
        return type(self).__name__

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_forward_backward_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_forward_backward_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_train_metrics(self, args: Any, state: Any, control: Any, *, metrics: Any, **kwargs: Any) -> Any: ...
    def on_log_step(self, args: Any, state: Any, control: Any, *, logs: Any, **kwargs: Any) -> Any: ...
    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **kwargs: Any) -> Any: ...
    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Any, **kwargs: Any) -> Any: ...
    def on_predict(self, args: Any, state: Any, control: Any, *, metrics: Any, **kwargs: Any) -> Any: ...
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...
