"""KempnerForge's dialect: a ``TrainingHook`` with five methods.

===========================================  ===========================================================================
``on_train_begin(config)``                   ``config`` is dalsegno's TrainingArguments
``on_step_end(ctx)``                         a :class:`StepContext`; after the step's record, if it has one
``on_eval_end(metrics, step)``               after an evaluation, of all sets: ``eval/loss``, ``eval/perplexity``
``on_checkpoint_save(step, path)``           ``path`` is the checkpoint's directory; the checkpoint is durable
``on_train_end(step, tokens_seen)``          always, after an exception too
===========================================  ===========================================================================

A hook may also have any native handler, with its native context: gradients exist from ``on_after_backward(ctx)`` to
``on_optimizer_step(ctx)``. A hook that raises KeyboardInterrupt, which stops training in KempnerForge, stops it at the
step's end, with a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dalsegno.events.adapters import CallbackAdapter
from dalsegno.events.callback import Answer, Binder
from dalsegno.events.contexts import Context, EvaluateContext, MetricsContext
from dalsegno.events.table import Event

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


__all__ = ["DIALECT", "HookRunner", "KempnerForge", "StepContext", "TrainingHook", "eval_metrics"]


class TrainingHook:
    """Base class with KempnerForge's methods. Override only those that are needed."""

    def on_train_begin(self, config: Any) -> None: ...
    def on_step_end(self, ctx: Any) -> None: ...
    def on_eval_end(self, metrics: dict[str, float], step: int) -> None: ...
    def on_checkpoint_save(self, step: int, path: str) -> None: ...
    def on_train_end(self, step: int, tokens_seen: int) -> None: ...


class HookRunner(list[Any]):
    """Hooks, as ``Trainer(callbacks=hook_runner)`` takes them. Without any, it costs nothing."""

    @property
    def hooks(self) -> list[Any]:
        return self


_METHODS: Mapping[str, tuple[Event, tuple[str, ...], Callable[[Any], Sequence[Any]]]] = {
    "on_train_begin": (Event.TRAIN_BEGIN, ("config",), lambda ctx: [ctx.args]),
    "on_step_end": (Event.TRAIN_METRICS, ("ctx",), lambda ctx: [_step_context(ctx)]),  # the loss of all ranks is known
    "on_eval_end": (Event.EVALUATE, ("metrics", "step"), lambda ctx: [eval_metrics(ctx), ctx.state.global_step]),
    "on_checkpoint_save": (Event.SAVE, ("step", "path"), lambda ctx: [ctx.step, str(ctx.path)]),
    "on_train_end": (
        Event.TRAIN_END,
        ("step", "tokens_seen"),
        lambda ctx: [ctx.state.global_step, ctx.state.num_input_tokens_seen],
    ),
}
"""When each is called, the names of its arguments, and these."""

_AFTER_RECORD = (Event.LOG, Event.STEP_DONE)
"""Events of which the first calls ``on_step_end`` of a step that has a record; the other, if no record came."""

Call = Callable[[Any, Any], Answer]


@dataclass
class StepContext:
    """Argument of ``on_step_end``."""

    step: int
    """Number of finished steps, including this one."""
    loss: float
    """Mean over the step's samples on all ranks; may be NaN or infinite."""
    grad_norm: float
    """Total L2 norm before clipping; NaN if a user's own loop does not pass it."""
    lr: float
    """Learning rate of the next step: read after the scheduler's step."""
    tokens_seen: int
    """Tokens on all ranks; exact at each record."""
    model: nn.Module
    optimizer: Optimizer


class KempnerForge(CallbackAdapter):
    """Adapts a ``TrainingHook``."""

    dialect = "kempnerforge"
    packages = ("kempnerforge", "dalsegno.interop.kempner")
    bases = ("TrainingHook",)
    background_safe = True
    saves_states = False
    calls = (
        *((event, method) for method, (event, *_) in _METHODS.items()),
        *((event, event.handler) for event in Event if event.handler not in _METHODS),
        *((event, "on_step_end") for event in _AFTER_RECORD),
    )

    def __init__(self, foreign: object, name: str | None = None) -> None:
        super().__init__(foreign, name)
        self._ended: StepContext | None = None  # the step whose record is awaited

    def arguments(self, method: str) -> tuple[Sequence[str], Sequence[str]]:
        return (_METHODS[method][1] if method in _METHODS else ("ctx",)), ()

    def call(self, event: Event, method: str, binder: Binder) -> Call:
        function = getattr(self.__wrapped__, method)
        if method not in _METHODS:
            return lambda _, ctx: function(ctx)
        arguments = _METHODS[method][2]

        def call(_: Any, ctx: Any) -> None:
            if event is Event.TRAIN_METRICS and ctx.state.will_log:
                self._ended = _step_context(ctx)
            elif event is not Event.EVALUATE or ctx.is_last:
                function(*arguments(ctx))

        def after_record(_: Any, ctx: Any) -> None:
            if self._ended is None or (event is Event.LOG and ctx.kind != "train"):
                return
            ended, self._ended = self._ended, None
            function(replace(ended, tokens_seen=ctx.state.num_input_tokens_seen))

        return call if event is Event.TRAIN_END else _or_stop(after_record if event in _AFTER_RECORD else call, method)


def _step_context(ctx: MetricsContext) -> StepContext:
    return StepContext(
        step=ctx.state.global_step,
        loss=ctx.metrics["loss"],
        grad_norm=ctx.metrics.get("grad_norm", math.nan),
        lr=float(ctx.optimizer.param_groups[0]["lr"]),
        tokens_seen=ctx.state.num_input_tokens_seen,
        model=ctx.model,
        optimizer=ctx.optimizer,
    )


_MAX_LOSS = 20.0
"""Loss from which on KempnerForge's perplexity no longer grows: e**20 is 4.9e8."""


def eval_metrics(ctx: EvaluateContext) -> dict[str, float]:
    """Return an evaluation's metrics under KempnerForge's names, with the perplexity of each loss.

    ``eval_loss`` becomes ``eval/loss``. Among several sets, set "a" has ``eval/a/loss``, and ``eval/loss`` is the loss
    that selects the best model, or else the first set's: KempnerForge has one set, and its hooks read this name.
    """
    sets = list(ctx.eval_dataloader) if isinstance(ctx.eval_dataloader, Mapping) else []
    metrics: dict[str, float] = {}
    for name, value in ctx.all_metrics.items():
        theirs = _their_name(name, sets)
        metrics[theirs] = value
        if theirs.endswith("/loss"):
            metrics[f"{theirs.removesuffix('loss')}perplexity"] = math.exp(min(value, _MAX_LOSS))
    if sets and "eval/loss" not in metrics:
        best = _their_name(ctx.args.best_metric_name, sets)
        main = best if best.endswith("/loss") and best in metrics else f"eval/{sets[0]}/loss"
        metrics["eval/loss"] = metrics[main]
        metrics["eval/perplexity"] = metrics[f"{main.removesuffix('loss')}perplexity"]
    return metrics


def _their_name(name: str, sets: Sequence[str]) -> str:
    own = name.removeprefix("eval_")
    for each in sorted(sets, key=len, reverse=True):
        if own.startswith(f"{each}_"):
            return f"eval/{each}/{own.removeprefix(f'{each}_')}"
    return f"eval/{own}"


def _or_stop(call: Callable[[Any, Any], None], method: str) -> Call:
    """Turn KeyboardInterrupt, also from Ctrl-C while the hook runs, into a request to stop."""

    def handler(adapted: Any, ctx: Context) -> None:
        try:
            call(adapted, ctx)
        except KeyboardInterrupt:
            ctx.control.stop(f"{method} raised KeyboardInterrupt", by=adapted.key)

    return handler


DIALECT = KempnerForge
