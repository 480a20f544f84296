"""SharedState: the position of a run in Cerebras's order, shared by all callbacks of this dialect.

In that order, a *fit* consists of stretches of training with validations between them. A stretch begins with its first
step and ends before an evaluation, or with the run.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from dalsegno.events.callback import Callback
from dalsegno.events.contexts import (
    BeforeForwardContext,
    Context,
    EvaluateBeginContext,
    EvaluateContext,
    ExceptionContext,
    LogContext,
    MicrobatchBeginContext,
    MicrobatchEndContext,
    StepDoneContext,
    StepEndContext,
    TrainBeginContext,
    TrainEndContext,
)

from .schedule import batches_in
from .trainer import Trainer, plain


class Record(dict[str, Any]):
    """Takes logged values into an existing record, as values that a record can have."""

    def __init__(self, logs: dict[str, Any]) -> None:
        super().__init__()
        self._logs = logs

    def update(self, metrics: Any) -> None:  # type: ignore[override]
        self._logs.update(plain(metrics))


class SharedState(Callback):
    """Handles each event before Cerebras's callbacks do, so that its attributes are up to date for them."""

    name = "cerebras"

    def __init__(self, context: Context) -> None:
        self.trainer = Trainer(context)
        self.loader: Any = None
        """Loader of the evaluation set that is being validated."""
        self.fitting = False
        self.training = False
        self.validating = False
        self.begins_stretch = False
        """Whether a stretch of training begins with this step."""
        self.ends_stretch = False
        """Whether a stretch ends at this event."""
        self.stretch = -1
        self.ends_well = False
        """Whether a fit ends at this event, without an exception."""
        self.broken: set[str] = set()
        """Parts that an exception has ended: "validate", "train", "fit"."""
        self.last: tuple[Any, Any] = (None, None)
        """Outputs and batch of the step's last micro-batch."""
        self._set_up: dict[str, WeakSet[Callback]] = {}

    def is_first(self, callback: Callback, method: str) -> bool:
        """Whether this is the first call for this callback and method."""
        done = self._set_up.setdefault(method, WeakSet())
        is_first = callback not in done
        done.add(callback)
        return is_first

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self.fitting, self.training, self.validating = True, False, False
        position = self.trainer.position
        position.initial_step, position.val_name, position.is_counted = ctx.state.global_step, None, False
        self.stretch = -1
        self.broken = set()

    def on_step_begin(self, ctx: Context) -> None:
        self.begins_stretch = not self.training
        if self.begins_stretch:
            self.training = True
            self.stretch += 1
            self.trainer.position.batch_idx = -1
        position, state = self.trainer.position, ctx.state
        position.is_counted, position.val_name = False, None
        position.ends_stretch = (state.will_evaluate and self.trainer.schedule.evaluates) or (
            state.global_step + 1 == state.max_steps
        )
        self._collect(ctx.state.will_log)

    def on_microbatch_begin(self, ctx: MicrobatchBeginContext) -> None:
        self.trainer.position.batch_idx += 1
        self.trainer.position.microbatch = ctx.index
        self.trainer.should_run_optimizer_step = False

    def on_microbatch_end(self, ctx: MicrobatchEndContext) -> None:
        self.trainer.should_run_optimizer_step = ctx.is_last
        if ctx.is_last:
            self.last = (ctx.outputs, ctx.batch)

    def on_step_end(self, ctx: StepEndContext) -> None:
        self.trainer.position.is_counted = True
        if self.trainer.early_exit.should_exit:
            ctx.control.stop("a function of trainer.early_exit returned True", by="early_exit")

    def on_log_step(self, ctx: LogContext) -> None:
        collected = self.trainer.collected
        if ctx.kind not in ("train", "eval") or collected is None:
            return
        ctx.logs.update(plain(collected))
        # What on_validate_end logs, which is called with this event, is in the evaluation's record, too.
        self.trainer.collected = Record(ctx.logs) if ctx.kind == "eval" else None

    def on_log(self, ctx: LogContext) -> None:
        if ctx.kind == "eval":
            self.trainer.collected = None

    def on_evaluate_begin(self, ctx: EvaluateBeginContext) -> None:
        self.ends_stretch, self.training = self.training, False
        self.validating = True
        self.loader = _loader_of_set(ctx)
        position = self.trainer.position
        position.val_name = ctx.name if isinstance(ctx.eval_dataloader, dict) else "validate"
        position.val_batches, position.val_batch_idx = batches_in(self.loader), -1
        self._collect(True)

    def on_before_forward(self, ctx: BeforeForwardContext) -> None:
        if self.validating:
            self.trainer.position.val_batch_idx += 1

    def on_evaluate(self, ctx: EvaluateContext) -> None:
        self.validating, self.trainer.position.val_name = False, None
        self.trainer.collected = None

    def on_step_done(self, ctx: StepDoneContext) -> None:
        self._collect(None)
        self.last = (None, None)

    def on_exception(self, ctx: ExceptionContext) -> None:
        now = {"validate": self.validating, "train": self.training, "fit": self.fitting}
        self.broken = {part for part, is_active in now.items() if is_active}
        self.training = self.validating = False

    def on_train_end(self, ctx: TrainEndContext) -> None:
        self.ends_stretch, self.training, self.validating = self.training, False, False
        self.trainer.position.val_name = None
        self.ends_well, self.fitting = self.fitting and not self.broken, False
        self._collect(None)
        self.trainer.early_exit.reset_exit_fns()

    def _collect(self, for_a_record: bool | None) -> None:
        """True: what callbacks log goes into the next record. False: it is dropped. None: it is a separate record."""
        self.trainer.collected = {} if for_a_record else None
        self.trainer.is_silent = for_a_record is False


def _loader_of_set(ctx: EvaluateBeginContext) -> Any:
    """Return the loader that is evaluated: among several sets, the one of that name."""
    loaders = ctx.eval_dataloader
    return loaders[ctx.name] if isinstance(loaders, dict) else loaders
