"""Callback: the base class of everything that listens to a run.

Override only what is needed: a handler that is not overridden is never called. A callback with ``state_dict`` and
``load_state_dict`` is saved with each checkpoint and restored from it, without any registration::

    class TokensPerDomain(ds.Callback):
        state_scope = "per_rank"

        def __init__(self):
            self.tokens = {}

        def on_microbatch_end(self, ctx):
            domain = ctx.batch["domain"][0]
            self.tokens[domain] = self.tokens.get(domain, 0) + ctx.batch["input_ids"].numel()

        def state_dict(self):
            return {"tokens": self.tokens}

        def load_state_dict(self, state):
            self.tokens = state["tokens"]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Literal, Protocol, Self, TypeVar

from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.state import Handler, TrainerControl
from dalsegno.stateful.component import Component, Scope, Stateful

from . import contexts
from .table import Event

Answer = TrainerControl | None
"""A handler may return a TrainerControl, whose flags are then taken over."""

HANDLERS = {event.handler: event for event in Event}

C = TypeVar("C", bound="Callback")


class Binder(Protocol):
    """Who binds callbacks to the events of a run."""

    def shared(self, kind: Callable[[contexts.Context], C]) -> C:
        """The one callback of this kind in the run, made when it is first asked for.

        What several callbacks need once a run lives there. It is called before them, and saved if it has state.
        """
        ...


class Callback:
    """Listens to a run. Handlers run on the main thread, on all ranks, in the order of the callbacks."""

    name: str | None = None
    """The key under which state is saved; None: the class's name. Two callbacks of one class need it."""
    aliases: tuple[str, ...] = ()
    """Keys under which the state was saved in former times, such as the class's old name."""
    state_scope: Scope = "replicated"
    """``"replicated"``: rank 0's state is saved and given to every rank. ``"per_rank"``: each its own."""
    state_version: int = 1
    """Raise it when the state's form changes, and upgrade older ones in ``migrate(state, from_version)``."""
    makes_wishes: bool = True
    """False: no handler ever sets a flag of ``ctx.control``. One that may, at any step, makes several ranks agree at
    every step, which costs a small reduction."""
    observes: bool = True
    """False: its handlers need more than what is in the context, so that a snapshot of it, later, would not do."""
    needs_evaluations: bool = False
    """True: without evaluations it would be of no use, so a run that has nothing to evaluate on is refused."""
    ranks: Literal["all", "zero"] = "all"
    """``"zero"``: handlers run on rank 0 only. Such a callback must not call a collective."""

    @property
    def key(self) -> str:
        """Where its state lies in a checkpoint. Order, arguments and the module of the class never change it."""
        return self.name or type(self).__name__

    def handled_events(self) -> list[Event]:
        """The events that this callback has a handler of its own for.

        Raises:
            UnknownName: for a method ``on_…`` that is no event's handler, with the nearest event's name.
            ConfigurationError: for a handler with other parameters than ``(self, ctx)``.
        """
        names = {name for name in dir(self) if name.startswith("on_")} | set(vars(self)) & set(HANDLERS)
        for name in names:
            if name not in HANDLERS and callable(getattr(self, name)):
                raise UnknownName(f"handler in {type(self).__name__}:", name, HANDLERS)
        events = [event for event in Event if self._overrides(event.handler)]
        for event in events:
            _check_signature(self, event)
        return events

    def _overrides(self, handler: str) -> bool:
        own = getattr(type(self), handler) is not getattr(Callback, handler)
        return own or handler in vars(self)

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        """What is called at which event of one run, in this order."""
        return [(event, getattr(self, event.handler)) for event in self.handled_events()]

    def __enter__(self) -> Self:
        """Inside ``with callback:`` it listens to every run that begins there."""
        hold_globally(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        drop_globally(self)

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


def _check_signature(callback: Callback, event: Event) -> None:
    handler = getattr(callback, event.handler)
    try:
        inspect.signature(handler).bind(object())
    except TypeError as error:
        raise ConfigurationError(
            f"{callback.key}.{event.handler}({', '.join(inspect.signature(handler).parameters)}): a handler takes "
            "(self, ctx); what else it needs is in ctx: ctx.args, ctx.state, ctx.control, ctx.model, …"
        ) from error


def components_of(callbacks: Iterable[Callback]) -> list[Component]:
    """The callbacks that have state, as components under ``callbacks.<key>``."""
    return [
        Component(f"callbacks.{callback.key}", callback) for callback in callbacks if isinstance(callback, Stateful)
    ]


_global: dict[int, tuple[Callback, int]] = {}  # id → the callback and how often it is held


def global_callbacks() -> list[Callback]:
    """Those registered for every run, in order of registration."""
    return [callback for callback, _ in _global.values()]


def hold_globally(callback: Callback) -> None:
    """Once more; it listens to every run until it is dropped as often."""
    _, count = _global.get(id(callback), (callback, 0))
    _global[id(callback)] = (callback, count + 1)


def drop_globally(callback: Callback) -> None:
    """Once less."""
    _, count = _global[id(callback)]
    if count == 1:
        del _global[id(callback)]
    else:
        _global[id(callback)] = (callback, count - 1)
