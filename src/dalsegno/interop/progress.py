"""Progress: where a run is, as objects that stand in for another library's trainer report it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from dalsegno.events.callback import Callback
from dalsegno.events.contexts import (
    AfterForwardContext,
    BackwardContext,
    BeforeForwardContext,
    BeforeLoadContext,
    Context,
    EpochContext,
    EvaluateBeginContext,
    EvaluateContext,
    ExceptionContext,
    LogContext,
    MicrobatchBeginContext,
    MicrobatchEndContext,
    RollbackContext,
    StepDoneContext,
    StepEndContext,
    TrainBeginContext,
    TrainEndContext,
)
from dalsegno.stateful.schema import Count

from .collected import Collected


class ProgressState(TypedDict):
    batches: Count
    steps: Count
    samples: Count


class Progress(Callback):
    """Handles each event before a library's callbacks do, so that its attributes are up to date for them."""

    sets_control_flags = False
    state_schema: Any = ProgressState

    def __init__(self, context: Context) -> None:
        self.context = context
        self.collected = Collected(context.trainer)
        self.leg: object = None
        """A new object for each leg."""
        self.fitting = False
        self.ends_well = False
        """Whether a leg ends at this event, without an exception."""
        self.in_step = False
        """Whether a step has begun whose update is not counted yet."""
        self.epoch = 0
        self.batches = 0
        """Micro-batches of this epoch so far, including the one in progress."""
        self.steps = 0
        """Finished steps of this epoch."""
        self.is_first_microbatch = False
        """Whether this event belongs to the first micro-batch of its step."""
        self._samples_before = 0  # this epoch
        self.batch: Any = None
        self.outputs: Any = None
        """Of the newest micro-batch, or batch of an evaluation."""
        self.validating = False
        self.begins_validation = False
        """Whether an evaluation begins at this event, with the first of its sets."""
        self.val_batch = -1
        """Index of the batch within its set."""
        self.set_index = 0
        self.sets = 1
        """Number of evaluation sets."""
        self._validation_is_over = False

    @property
    def samples(self) -> int:
        """Samples of this epoch so far, on all ranks."""
        return self.context.state.samples_seen - self._samples_before

    @property
    def in_evaluation(self) -> bool:
        """Whether an evaluation is running; ``validating`` also holds after its last set, until the step ends."""
        return self.validating and not self._validation_is_over

    @property
    def is_last_set(self) -> bool:
        return self.set_index == self.sets - 1

    def on_before_load(self, ctx: BeforeLoadContext) -> None:
        self.leg = object()

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self.fitting, self.ends_well = True, False
        self.epoch = int(ctx.state.epoch)
        if self.leg is None:
            self.leg = object()

    def on_epoch_begin(self, ctx: EpochContext) -> None:
        self.epoch, self.batches, self.steps = ctx.epoch, 0, 0
        self._samples_before = ctx.state.samples_seen

    def on_step_begin(self, ctx: Context) -> None:
        self.in_step, self.validating = True, False
        self.collected.begin(has_record=ctx.state.will_log)

    def on_microbatch_begin(self, ctx: MicrobatchBeginContext) -> None:
        self.batches += 1
        self.is_first_microbatch = ctx.index == 0
        self.batch = ctx.batch

    def on_before_forward(self, ctx: BeforeForwardContext) -> None:
        if self.validating:
            self.val_batch += 1
            self.batch = ctx.batch

    def on_after_forward(self, ctx: AfterForwardContext | BackwardContext) -> None:
        self.outputs = ctx.outputs

    on_before_backward = on_after_forward

    def on_microbatch_end(self, ctx: MicrobatchEndContext) -> None:
        self.batch, self.outputs = ctx.batch, ctx.outputs

    def on_step_end(self, ctx: StepEndContext) -> None:
        self.in_step = False
        self.steps += 1

    def on_log_step(self, ctx: LogContext) -> None:
        self.collected.move_into(ctx)

    def on_evaluate_begin(self, ctx: EvaluateBeginContext) -> None:
        sets = list(ctx.eval_dataloader) if isinstance(ctx.eval_dataloader, Mapping) else [ctx.name]
        self.sets, self.set_index = len(sets), sets.index(ctx.name) if ctx.name in sets else 0
        self.begins_validation = not self.validating or self._validation_is_over
        self.validating, self._validation_is_over, self.val_batch = True, False, -1
        self.collected.begin(has_record=True)

    def on_evaluate(self, ctx: EvaluateContext) -> None:
        self._validation_is_over = ctx.is_last
        self.collected.end()

    def on_step_done(self, ctx: StepDoneContext) -> None:
        self.validating = False
        self.batch = self.outputs = None
        self.collected.end()

    def on_epoch_end(self, ctx: EpochContext) -> None:
        self.epoch = ctx.epoch

    def on_rollback(self, ctx: RollbackContext) -> None:
        self.epoch = int(ctx.state.epoch)

    def on_exception(self, ctx: ExceptionContext) -> None:
        self.fitting = self.validating = False

    def on_train_end(self, ctx: TrainEndContext) -> None:
        self.ends_well, self.fitting = self.fitting, False
        self.in_step = self.validating = False
        self.leg = None
        self.collected.end()

    def state_dict(self) -> Any:
        return {"batches": self.batches, "steps": self.steps, "samples": self._samples_before}

    def load_state_dict(self, state: Any) -> None:
        self.batches, self.steps, self._samples_before = state["batches"], state["steps"], state["samples"]
