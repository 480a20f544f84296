"""Kinds of rows in Cerebras's order: how each binds and calls a method of a callback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from dalsegno.events.callback import Callback
from dalsegno.events.contexts import BeforeForwardContext, LogContext, SaveContext
from dalsegno.events.table import Event

from .shared_state import SharedState

Stacks = dict[str, ExitStack]
"""What one callback has opened and not yet closed, by the part of the order: "fit", "train" or "validate"."""
Bound = Callable[[Callback, Any], None]

ARGUMENTS: dict[str, Callable[[SharedState, Any], Any]] = {
    "model": lambda shared, ctx: ctx.model,
    "optimizer": lambda shared, ctx: ctx.optimizer,
    "scheduler": lambda shared, ctx: ctx.scheduler,
    "train_dataloader": lambda shared, ctx: ctx.train_dataloader,
    "val_dataloaders": lambda shared, ctx: ctx.eval_dataloader,
    "val_dataloader": lambda shared, ctx: shared.loader,
    "loop": lambda shared, ctx: shared.trainer.loop,
    "val_loop": lambda shared, ctx: shared.trainer.loop.val_loop,
    "loop_idx": lambda shared, ctx: shared.stretch,
    "batch": lambda shared, ctx: ctx.batch,
    "batch_idx": lambda shared, ctx: shared.trainer.batch_idx,
    "val_batch_idx": lambda shared, ctx: shared.trainer.position.val_batch_idx,
    "outputs": lambda shared, ctx: ctx.outputs,
    "last_outputs": lambda shared, ctx: shared.last[0],
    "last_batch": lambda shared, ctx: shared.last[1],
    "ckpt_path": lambda shared, ctx: ctx.path,
    "exception": lambda shared, ctx: ctx.exception,
}

CONDITIONS: dict[str, Callable[[SharedState, Any], bool]] = {
    "a stretch begins": lambda shared, ctx: shared.begins_stretch,
    "a stretch ends": lambda shared, ctx: shared.ends_stretch,
    "validating": lambda shared, ctx: shared.validating,
    "a validation ends": lambda shared, ctx: shared.validating and ctx.kind == "eval",
    "more follow": lambda shared, ctx: not ctx.is_last,
    "the fit ends well": lambda shared, ctx: shared.ends_well,
    "validation broke": lambda shared, ctx: "validate" in shared.broken and isinstance(ctx.exception, Exception),
    "training broke": lambda shared, ctx: "train" in shared.broken and isinstance(ctx.exception, Exception),
    "the fit broke": lambda shared, ctx: "fit" in shared.broken and isinstance(ctx.exception, Exception),
}


@dataclass(frozen=True)
class Row(ABC):
    """One row of the order: calls ``method`` at ``event``."""

    event: Event
    method: str

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the method's arguments."""

    @abstractmethod
    def bind(self, method: Callable[..., Any], shared: SharedState, stacks: Stacks) -> Bound: ...


@dataclass(frozen=True)
class Call(Row):
    """Calls ``method(trainer, *given)``: always, or under the condition ``when``."""

    given: str = ""
    when: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return ("trainer", *self.given.split())

    def bind(self, method: Callable[..., Any], shared: SharedState, stacks: Stacks) -> Bound:
        trainer, given = shared.trainer, [ARGUMENTS[name] for name in self.given.split()]
        is_due = None if self.when is None else CONDITIONS[self.when]

        def call(_: Callback, ctx: Any) -> None:
            if is_due is None or is_due(shared, ctx):
                method(trainer, *[get(shared, ctx) for get in given])

        return call


class SetUp(Row):
    """Calls ``method(trainer)`` once in the life of a trainer."""

    names = ("trainer",)

    def bind(self, method: Callable[..., Any], shared: SharedState, stacks: Stacks) -> Bound:
        def call(adapted: Callback, ctx: Any) -> None:
            if shared.is_first(adapted, self.method):
                method(shared.trainer)

        return call


@dataclass(frozen=True)
class Within(Call):
    """Makes the call inside ``scope``, which changes what the trainer shows meanwhile."""

    scope: Callable[[SharedState, Any], AbstractContextManager[None]] = field(kw_only=True)

    def bind(self, method: Callable[..., Any], shared: SharedState, stacks: Stacks) -> Bound:
        inner = super().bind(method, shared, stacks)

        def call(adapted: Callback, ctx: Any) -> None:
            with self.scope(shared, ctx):
                inner(adapted, ctx)

        return call


def as_saved(shared: SharedState, ctx: SaveContext) -> AbstractContextManager[None]:
    """The trainer is that of the checkpoint."""
    return shared.trainer.as_of(ctx.state)


def before_count(shared: SharedState, ctx: Any) -> AbstractContextManager[None]:
    """The trainer has not counted the step yet whose last micro-batch ends."""
    before = ctx.state.copy()
    before.global_step -= 1
    return shared.trainer.as_of(before)


@contextmanager
def in_training(shared: SharedState, ctx: Any) -> Iterator[None]:
    """The trainer is not in the validation yet, at the end of a stretch."""
    position = shared.trainer.position
    name, position.val_name = position.val_name, None
    try:
        yield
    finally:
        position.val_name = name


class Log(Row):
    """Calls ``log_metrics(metrics, step)`` of a logger with each record."""

    names = ("metrics", "step")

    def bind(self, method: Callable[..., Any], shared: SharedState, stacks: Stacks) -> Bound:
        def call(_: Callback, ctx: LogContext) -> None:
            method(dict(ctx.logs), ctx.state.global_step)

        return call


@dataclass(frozen=True)
class Enter(Call):
    """Calls ``method(trainer, stack, *given)``; the stack stays open until :class:`Leave` of the same part."""

    part: str = field(kw_only=True)

    @property
    def names(self) -> tuple[str, ...]:
        return ("trainer", "stack", *self.given.split())

    def bind(self, method: Callable[..., Any], shared: SharedState, stacks: Stacks) -> Bound:
        def enter(trainer: object, *given: Any) -> None:
            stack = stacks[self.part] = ExitStack()
            method(trainer, stack, *given)

        return super().bind(enter, shared, stacks)


@dataclass(frozen=True)
class Leave(Row):
    """Closes the stack that ``method`` has opened, if it is open; with the exception, if there is one."""

    part: str
    names = ()

    def bind(self, method: Callable[..., Any], shared: SharedState, stacks: Stacks) -> Bound:
        def close(_: Callback, ctx: Any) -> None:
            stack = stacks.pop(self.part, None)
            error = getattr(ctx, "exception", None)
            if stack is not None:
                stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

        return close


class Forward(Row):
    """Calls ``method(trainer, model, batch, args, kwargs)``; ``args`` is ``[batch]``. The method may change both."""

    names = ("trainer", "model", "batch", "args", "kwargs")

    def bind(self, method: Callable[..., Any], shared: SharedState, stacks: Stacks) -> Bound:
        def call(_: Callback, ctx: BeforeForwardContext) -> None:
            batch = _as_batch(ctx)
            args: list[Any] = [batch]
            kwargs: dict[str, Any] = {}
            method(shared.trainer, ctx.model, batch, args, kwargs)
            _set_arguments(ctx, args, kwargs)

        return call


def _as_batch(ctx: BeforeForwardContext) -> Any:
    """Return the model's arguments as one batch, so that changes inside the batch take effect."""
    if isinstance(ctx.batch, Mapping):
        return ctx.call_kwargs
    if isinstance(ctx.batch, list):
        return ctx.call_args
    return tuple(ctx.call_args) if isinstance(ctx.batch, tuple) else ctx.call_args[0]


def _set_arguments(ctx: BeforeForwardContext, args: list[Any], kwargs: Mapping[str, Any]) -> None:
    """Set the model's arguments from ``[batch]`` and ``kwargs`` after the method has changed them."""
    batch, *more = args
    if isinstance(batch, Mapping):
        named, listed = dict(batch), []
    elif isinstance(batch, (tuple, list)):
        named, listed = {}, list(batch)
    else:
        named, listed = {}, [batch]
    ctx.call_args[:] = [*listed, *more]
    ctx.call_kwargs.clear()
    ctx.call_kwargs.update({**named, **kwargs})
