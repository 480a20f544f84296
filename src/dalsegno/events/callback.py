"""Callback: base class of everything that handles events of a run.

Override only what is needed: a handler that is not overridden is never called. A callback with ``state_dict`` and
``load_state_dict`` is saved with each checkpoint and restored from it, without registration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, TypeVar
from weakref import WeakSet

from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.state import Handler, TrainerControl
from dalsegno.stateful.annotations import ConstructorSignature
from dalsegno.stateful.component import Component, Scope, Stateful

from . import contexts
from .table import Event

if TYPE_CHECKING:
    from dalsegno.distributed.collectives import Gathered

Answer = TrainerControl | None
"""A handler may return a TrainerControl, whose flags are then copied."""

HANDLERS = {event.handler: event for event in Event}
_NAMES_ELSEWHERE = {
    **dict.fromkeys(("on_fit_start", "on_train_start"), "on_train_begin"),
    "on_fit_end": "on_train_end",
    "on_train_epoch_start": "on_epoch_begin",
    "on_train_epoch_end": "on_epoch_end",
    **dict.fromkeys(("on_batch_begin", "on_batch_start"), "on_microbatch_begin"),
    **dict.fromkeys(("on_train_batch_begin", "on_train_batch_start"), "on_microbatch_begin"),
    **dict.fromkeys(("on_batch_end", "on_train_batch_end", "on_substep_end"), "on_microbatch_end"),
    "on_before_optimizer_step": "on_pre_optimizer_step",
    **dict.fromkeys(("on_validation_start", "on_validation_begin"), "on_evaluate_begin"),
    "on_validation_end": "on_evaluate",
    "on_save_checkpoint": "state_dict() and load_state_dict() are what a callback saves; on_save is for its file",
    "on_load_checkpoint": "state_dict() and load_state_dict() are what a callback saves; on_load comes after them",
}
"""Handlers of Lightning, Keras and Hugging Face."""

C = TypeVar("C", bound="Callback")


class Binder(Protocol):
    """The object that binds callbacks to the events of a run (the dispatcher)."""

    def shared(self, kind: Callable[[contexts.Context], C]) -> C:
        """Return the run's only callback of this kind, created at the first call.

        It contains what several callbacks share. It is called before them, and saved if it has state.
        """

    def gather_for_record(self, gathered: Gathered) -> None:
        """Fetch these numbers for each training record, with all else that it needs of every rank.

        For a handler of on_log_step. Whoever fires that event without a record, or in another trainer, fetches none;
        then the handler gathers them itself.
        """
        ...


class Construction(NamedTuple):
    """The call that built a callback, so that another process can build an equal one."""

    make: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Name:
    """Attribute ``name`` of a callback: the given one, else its ``default_name``."""

    def __get__(self, callback: Any, owner: type) -> Any:
        return self if callback is None else vars(callback).get("_given_name") or callback.default_name

    def __set__(self, callback: Any, name: str | None) -> None:
        vars(callback)["_given_name"] = name


class Callback:
    """Handles events of a run: override the handlers ``on_…`` that you need, which docs/reference/events.md lists.

    Handlers run on the main thread, on all ranks, in the order of the callbacks.
    """

    __signature__ = ConstructorSignature()
    construction: Construction
    """How it was built: ``ds.launch`` builds it again in each rank."""

    name: str | None = Name()  # type: ignore[assignment]
    """Name in messages, and key under which the state is saved: by default the class's name. Two callbacks of the same
    class need different ones. Setting None restores the default."""
    aliases: tuple[str, ...] = ()
    """Earlier keys of the state, such as the class's old name."""
    state_scope: Scope = "replicated"
    """``"replicated"``: rank 0's state is saved and loaded by every rank. ``"per_rank"``: each rank has its own."""
    state_varies: Collection[str] = ()
    """Fields of the state in which two equal runs may differ, such as a random id: ``compare_runs`` leaves them out."""
    state_version: int = 1
    """Increase it when the state's schema changes, and upgrade older ones in ``migrate(state, from_version)``."""
    sets_control_flags: bool = True
    """False: no handler sets a flag of ``ctx.control``. If one may, at any step or record, several ranks have to agree
    there, which costs a small reduction. :meth:`requesting_events` tells at which events."""
    background_safe: bool = True
    """False: its handlers need more than a snapshot of the context, so ``Background`` refuses it."""
    needs_evaluations: bool = False
    """True: it needs evaluations, so a run without anything to evaluate on is refused."""
    needs_events: Collection[Event] = ()
    """Events without which it measures nothing, besides those that it handles: a loop that lacks one refuses it."""
    optional_events: Collection[Event] = ()
    """Events that it handles where a loop fires them, and does without elsewhere: such a loop does not refuse it."""
    only_at_evaluations: bool = False
    """True: without evaluations it does nothing, so a run without anything to evaluate on warns of it."""
    reads_nonfinite_loss: bool = False
    """True: it reads NaN or infinity from the ``loss`` of training records, which other trainers may leave out."""
    ranks: Literal["all", "zero"] = "all"
    """``"zero"``: handlers run on rank 0 only. Such a callback must not call a collective."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        callback = super().__new__(cls)
        callback.construction = Construction(cls, args, kwargs)
        return callback

    def __init__(self) -> None:  # refuses the arguments that __new__ takes, for classes without an __init__
        super().__init__()

    @property
    def default_name(self) -> str:
        """Name of a callback that is not given one."""
        return type(self).__name__

    @property
    def key(self) -> str:
        """Key of the state in a checkpoint, independent of order, arguments and the class's module."""
        return self.name or self.default_name

    def handled_events(self) -> list[Event]:
        """Return the events whose handlers this callback overrides.

        Raises:
            UnknownName: for a method ``on_…`` that is not a handler of any event; suggests the nearest.
            ConfigurationError: for a handler with other parameters than ``(self, ctx)``.
        """
        kinds = (vars(kind) for kind in type(self).__mro__ if kind is not Callback)  # asked dozens of times in a leg
        names = {name for own in (*kinds, vars(self)) for name in own if name.startswith("on_")}
        for name in names:
            if name not in HANDLERS and callable(getattr(self, name)):
                raise UnknownName(f"handler in {type(self).__name__}:", name, HANDLERS, _NAMES_ELSEWHERE)
        events = [event for handler, event in HANDLERS.items() if handler in names and not self._is_empty(handler)]
        for event in events:
            _check_signature(self, event)
        return events

    def _is_empty(self, handler: str) -> bool:
        """Of a class that switches off what it inherits: ``on_log = Callback.on_log``."""
        own = getattr(self, handler)
        return getattr(own, "__func__", own) is getattr(Callback, handler)

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        """Return the events of one run and the handlers to call, in this order."""
        return [(event, getattr(self, event.handler)) for event in self.handled_events()]

    def requesting_events(self) -> Collection[Event]:
        """Return the events whose handlers may set a flag of ``ctx.control``, equal on all ranks: unless
        :attr:`sets_control_flags` is False, all that it handles."""
        return self.handled_events() if self.sets_control_flags else ()

    def idle_events(self) -> Collection[Event]:
        """Return events whose handlers have nothing to do in this leg, so that they are not called: asked after
        on_train_begin."""
        return ()

    def __enter__(self) -> Self:
        """Inside ``with callback:`` every run that starts there calls its handlers."""
        register_globally(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unregister_globally(self)

    def on_init_end(self, ctx: contexts.Context) -> Answer: ...
    def on_before_load(self, ctx: contexts.BeforeLoadContext) -> Answer: ...
    def on_load(self, ctx: contexts.LoadContext) -> Answer: ...
    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> Answer: ...
    def on_epoch_begin(self, ctx: contexts.EpochContext) -> Answer: ...
    def on_step_begin(self, ctx: contexts.Context) -> Answer: ...
    def on_microbatch_begin(self, ctx: contexts.MicrobatchBeginContext) -> Answer: ...
    def on_before_forward(self, ctx: contexts.BeforeForwardContext) -> Answer: ...
    def on_after_forward(self, ctx: contexts.AfterForwardContext) -> Answer: ...
    def on_before_backward(self, ctx: contexts.BackwardContext) -> Answer: ...
    def on_after_backward(self, ctx: contexts.BackwardContext) -> Answer: ...
    def on_microbatch_end(self, ctx: contexts.MicrobatchEndContext) -> Answer: ...
    def on_gradients_ready(self, ctx: contexts.Context) -> Answer: ...
    def on_pre_optimizer_step(self, ctx: contexts.PreOptimizerStepContext) -> Answer: ...
    def on_optimizer_step(self, ctx: contexts.Context) -> Answer: ...
    def on_step_skipped(self, ctx: contexts.StepSkippedContext) -> Answer: ...
    def on_before_zero_grad(self, ctx: contexts.Context) -> Answer: ...
    def on_after_zero_grad(self, ctx: contexts.Context) -> Answer: ...
    def on_before_scheduler_step(self, ctx: contexts.SchedulerContext) -> Answer: ...
    def on_after_scheduler_step(self, ctx: contexts.SchedulerContext) -> Answer: ...
    def on_step_end(self, ctx: contexts.StepEndContext) -> Answer: ...
    def on_train_metrics(self, ctx: contexts.MetricsContext) -> Answer: ...
    def on_log_step(self, ctx: contexts.LogContext) -> Answer: ...
    def on_log(self, ctx: contexts.LogContext) -> Answer: ...
    def on_evaluate_begin(self, ctx: contexts.EvaluateBeginContext) -> Answer: ...
    def on_prediction_step(self, ctx: contexts.PredictionStepContext) -> Answer: ...
    def on_evaluate_end(self, ctx: contexts.EvaluateEndContext) -> Answer: ...
    def on_evaluate(self, ctx: contexts.EvaluateContext) -> Answer: ...
    def on_predict(self, ctx: contexts.MetricsContext) -> Answer: ...
    def on_before_save(self, ctx: contexts.BeforeSaveContext) -> Answer: ...
    def on_save(self, ctx: contexts.SaveContext) -> Answer: ...
    def on_step_done(self, ctx: contexts.StepDoneContext) -> Answer: ...
    def on_epoch_end(self, ctx: contexts.EpochContext) -> Answer: ...
    def on_rollback(self, ctx: contexts.RollbackContext) -> Answer: ...
    def on_exception(self, ctx: contexts.ExceptionContext) -> Answer: ...
    def on_train_end(self, ctx: contexts.TrainEndContext) -> Answer: ...


for _event in Event:
    _adds = ", ".join(vars(_event.context).get("__annotations__", ()))
    getattr(Callback, _event.handler).__doc__ = f"{_event.fires}.{_adds and f' Adds to ctx: {_adds}.'}"

_checked: WeakSet[FunctionType] = WeakSet()
"""Functions of classes known to take (self, ctx): inspecting one takes 20 µs, and a leg asks hundreds of times."""


class FlaglessCallback(Callback):
    """Base class of callbacks that set no flag of ``ctx.control``."""

    sets_control_flags = False


def _check_signature(callback: Callback, event: Event) -> None:
    handler = getattr(callback, event.handler)
    function = getattr(handler, "__func__", None)
    if isinstance(function, FunctionType) and function in _checked:
        return
    if (error := refusal(handler, object())) is not None:
        raise ConfigurationError(
            f"{callback.key}.{event.handler}({', '.join(inspect.signature(handler).parameters)}): a handler takes "
            "(self, ctx); everything else is in ctx: ctx.args, ctx.state, ctx.control, ctx.model, …. For Hugging "
            "Face's (args, state, control, **kwargs) derive the class from dalsegno.TrainerCallback"
        ) from error
    if isinstance(function, FunctionType):
        _checked.add(function)


def refusal(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> TypeError | None:
    """Return why a function cannot be called with these arguments; None if it can, or has no signature (a builtin)."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return error
    except ValueError:
        return None
    return None


def components_of(callbacks: Iterable[Callback]) -> list[Component]:
    """Return the callbacks that have state, as components under ``callbacks.<key>``."""
    return [
        Component(f"callbacks.{callback.key}", callback) for callback in callbacks if isinstance(callback, Stateful)
    ]


_global: list[Callback] = []  # each as often as it is registered


def global_callbacks() -> list[Callback]:
    """Return the callbacks registered for every run, in order of registration."""
    return list({id(callback): callback for callback in _global}.values())


def register_globally(callback: Callback) -> None:
    """Register ``callback`` once more for every run; it takes as many unregistrations to remove it."""
    _global.append(callback)


def unregister_globally(callback: Callback) -> None:
    """Undo one registration, the last one."""
    del _global[max(number for number, each in enumerate(_global) if each is callback)]
