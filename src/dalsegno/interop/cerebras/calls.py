"""The ways in which a method of Cerebras's callbacks is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from dalsegno.events.callback import Callback
from dalsegno.events.contexts import BeforeForwardContext
from dalsegno.events.table import Event

from .shared_state import SharedState

Stacks = dict[str, ExitStack]
"""What one callback has opened and not closed yet, by the part of the order that it is open for."""
Bound = Callable[[Callback, Any], None]

GIVEN: dict[str, Callable[[SharedState, Any], Any]] = {
    "model": lambda company, ctx: ctx.model,
    "optimizer": lambda company, ctx: ctx.optimizer,
    "scheduler": lambda company, ctx: ctx.scheduler,
    "train_dataloader": lambda company, ctx: ctx.train_dataloader,
    "val_dataloaders": lambda company, ctx: ctx.eval_dataloader,
    "val_dataloader": lambda company, ctx: company.loader,
    "loop": lambda company, ctx: company.trainer.loop,
    "val_loop": lambda company, ctx: company.trainer.loop.val_loop,
    "loop_idx": lambda company, ctx: company.stretch,
    "batch": lambda company, ctx: ctx.batch,
    "batch_idx": lambda company, ctx: company.trainer.batch_idx,
    "val_batch_idx": lambda company, ctx: company.val_batch_idx,
    "next_val_batch_idx": lambda company, ctx: company.val_batch_idx + 1,
    "outputs": lambda company, ctx: ctx.outputs,
    "last_outputs": lambda company, ctx: company.last[0],
    "last_batch": lambda company, ctx: company.last[1],
    "ckpt_path": lambda company, ctx: None if ctx.path is None else str(ctx.path),
    "exception": lambda company, ctx: ctx.exception,
}

WHEN: dict[str, Callable[[SharedState, Any], bool]] = {
    "a stretch begins": lambda company, ctx: company.begins_stretch,
    "a stretch ends": lambda company, ctx: company.ends_stretch,
    "validating": lambda company, ctx: company.validating,
    "more follow": lambda company, ctx: not ctx.is_last,
    "the fit ends well": lambda company, ctx: company.ends_well,
    "validation broke": lambda company, ctx: "validate" in company.broken and isinstance(ctx.exception, Exception),
    "training broke": lambda company, ctx: "train" in company.broken and isinstance(ctx.exception, Exception),
    "the fit broke": lambda company, ctx: "fit" in company.broken and isinstance(ctx.exception, Exception),
}


class Row(Protocol):
    """One line of the order."""

    @property
    def event(self) -> Event: ...
    @property
    def method(self) -> str: ...
    @property
    def names(self) -> tuple[str, ...]:
        """What the method is called with."""

    def bind(self, method: Callable[..., Any], company: SharedState, stacks: Stacks) -> Bound: ...


@dataclass(frozen=True, slots=True)
class Call:
    """``method(trainer, *given)``, always or ``when`` says so."""

    event: Event
    method: str
    given: str = ""
    when: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return ("trainer", *self.given.split())

    def bind(self, method: Callable[..., Any], company: SharedState, stacks: Stacks) -> Bound:
        trainer, given = company.trainer, [GIVEN[name] for name in self.given.split()]
        is_due = None if self.when is None else WHEN[self.when]

        def call(_: Callback, ctx: Any) -> None:
            if is_due is None or is_due(company, ctx):
                method(trainer, *[get(company, ctx) for get in given])

        return call


@dataclass(frozen=True, slots=True)
class SetUp:
    """``method(trainer)``, once in the life of a trainer."""

    event: Event
    method: str
    names = ("trainer",)

    def bind(self, method: Callable[..., Any], company: SharedState, stacks: Stacks) -> Bound:
        def call(adapted: Callback, ctx: Any) -> None:
            if company.is_first(adapted, self.method):
                method(company.trainer)

        return call


@dataclass(frozen=True, slots=True)
class Enter:
    """``method(trainer, stack, *given)``: what it puts on the stack stays open until :class:`Leave` of that part."""

    event: Event
    method: str
    part: str
    given: str
    when: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return ("trainer", "stack", *self.given.split())

    def bind(self, method: Callable[..., Any], company: SharedState, stacks: Stacks) -> Bound:
        def enter(trainer: object, *given: Any) -> None:
            stack = stacks[self.part] = ExitStack()
            method(trainer, stack, *given)

        return Call(self.event, self.method, self.given, self.when).bind(enter, company, stacks)


@dataclass(frozen=True, slots=True)
class Leave:
    """Closes what ``method`` has opened, if it is open; with the exception, if there is one."""

    event: Event
    method: str
    part: str
    names = ()

    def bind(self, method: Callable[..., Any], company: SharedState, stacks: Stacks) -> Bound:
        def close(_: Callback, ctx: Any) -> None:
            stack = stacks.pop(self.part, None)
            error = getattr(ctx, "exception", None)
            if stack is not None:
                stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

        return close


@dataclass(frozen=True, slots=True)
class Forward:
    """``method(trainer, model, batch, args, kwargs)``: ``args`` is ``[batch]``, and both may be changed."""

    event: Event
    method: str
    names = ("trainer", "model", "batch", "args", "kwargs")

    def bind(self, method: Callable[..., Any], company: SharedState, stacks: Stacks) -> Bound:
        def call(_: Callback, ctx: BeforeForwardContext) -> None:
            batch = _as_one(ctx)
            args: list[Any] = [batch]
            kwargs: dict[str, Any] = {}
            method(company.trainer, ctx.model, batch, args, kwargs)
            _spread(ctx, args, kwargs)

        return call


def _as_one(ctx: BeforeForwardContext) -> Any:
    """The model's arguments as the one batch that they come from, so that changes made inside of it count."""
    if isinstance(ctx.batch, Mapping):
        return ctx.call_kwargs
    if isinstance(ctx.batch, list):
        return ctx.call_args
    return tuple(ctx.call_args) if isinstance(ctx.batch, tuple) else ctx.call_args[0]


def _spread(ctx: BeforeForwardContext, args: list[Any], kwargs: Mapping[str, Any]) -> None:
    """The model's arguments from what has become of ``[batch]`` and ``kwargs``."""
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
