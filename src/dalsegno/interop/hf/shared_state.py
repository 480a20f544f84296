"""SharedState: what all callbacks in Hugging Face's style share in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NoReturn, TypedDict

from dalsegno.distributed import collectives
from dalsegno.events import contexts
from dalsegno.events.callback import Callback
from dalsegno.interop.hf.arguments import Arguments, State
from dalsegno.state import TrainerState
from dalsegno.stateful.schema import Must
from dalsegno.system import filesystem

RANK_PEAK_MEM = "rank_peak_mem"
"""Key of a list that dalsegno logs by default, with each rank's peak memory."""


class History(TypedDict):
    log_history: list[
        Annotated[dict[str, Any], Must("a record with its step", lambda record: type(record["step"]) is int)]
    ]
    inside_epoch: bool


class SharedState(Callback):
    """``args``, ``state`` and loaders in Hugging Face's form; the history of records, which is saved with the run."""

    name = "huggingface"
    sets_control_flags = False
    state_schema = History
    state_compared = False  # records contain times that each rank measures by its own clock

    def __init__(self, context: contexts.Context) -> None:
        self.context = context
        self._eval_loaders = loaders_of(context.eval_dataloader)
        self.args = Arguments(context, evaluates=context.eval_dataloader is None or bool(self._eval_loaders))
        self.log_history: list[dict[str, Any]] = []
        self.state = State(context.state, self.args, self.log_history)
        own = context.train_dataloader
        self.train_dataloader = Batches(own) if hasattr(own, "microbatches_per_epoch") else own
        self.eval_dataloader = next(iter(self._eval_loaders.values()), None)
        """Loader of the evaluation set that is evaluated now, or was last."""
        self.record = SharedRecord(context.state, self._record_of)
        self._batches = 0  # of the newest evaluation
        self.inside_epoch = False
        self.joined_epoch = False
        """Whether this leg began inside an epoch."""

    def state_at(self, state: TrainerState) -> State:
        """Return the shared state for the live ``state``; for a snapshot, a state as of that snapshot's step."""
        if state is self.context.state:
            return self.state
        until_then = [record for record in tuple(self.log_history) if record["step"] <= state.global_step]
        return State(state, self.args, until_then)

    def on_init_end(self, ctx: contexts.Context) -> None:
        """Create the directories that integrations expect to exist, as Hugging Face's Trainer does."""
        filesystem.make_directory(ctx.args.directory / "logs")

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self.args.logging_dir = collectives.from_rank_zero(self.args.unused_logging_dir)
        self.joined_epoch = self.inside_epoch = self.inside_epoch or ctx.state.epoch % 1 > 0

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        """End the run where a callback's ``state.max_steps`` does, as Hugging Face's flow does in this event."""
        steps = self.state.steps_set
        if steps is not None and 0 < steps <= ctx.step and not ctx.control.should_training_stop:
            ctx.control.stop(f"a callback has set state.max_steps to {steps}", final=True, by=self.name)

    def on_epoch_begin(self, ctx: contexts.EpochContext) -> None:
        self.inside_epoch = True

    def on_epoch_end(self, ctx: contexts.EpochContext) -> None:
        self.inside_epoch = False

    def on_log(self, ctx: contexts.LogContext) -> None:
        self.log_history.append({**self._record_of(ctx), "step": ctx.state.global_step})

    def on_prediction_step(self, ctx: contexts.PredictionStepContext) -> None:
        self._batches = ctx.index + 1

    def _with_steps_per_second(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Add the batches per second, which Hugging Face measures in addition, to an evaluation's metrics."""
        for name, seconds in list(metrics.items()):
            if name.endswith("_runtime") and seconds and self._batches:
                metrics[f"{name.removesuffix('runtime')}steps_per_second"] = self._batches / seconds
        return metrics

    def on_evaluate_begin(self, ctx: contexts.EvaluateBeginContext) -> None:
        self._batches = 0
        self.eval_dataloader = self._eval_loaders.get(ctx.name, self.eval_dataloader)

    def metrics_of(self, ctx: contexts.EvaluateContext | contexts.MetricsContext) -> dict[str, Any]:
        """Return a copy of an evaluation's metrics, with those that Hugging Face has in addition."""
        return self._with_steps_per_second({**ctx.metrics, "epoch": ctx.state.epoch})

    def _record_of(self, ctx: contexts.LogContext) -> dict[str, Any]:
        record = record_of(ctx)
        return self._with_steps_per_second(record) if ctx.kind == "eval" else record

    def state_dict(self) -> History:
        return {"log_history": self.log_history, "inside_epoch": self.inside_epoch}

    def load_state_dict(self, state: History) -> None:
        self.log_history[:] = state["log_history"]
        self.inside_epoch = state["inside_epoch"]


class SharedRecord:
    """The record that all callbacks of a library receive for one event, as in that library: each sees what earlier ones
    changed. In the background, where a context has a copy of the ``live`` state, each callback gets a copy."""

    def __init__(self, live: TrainerState, convert: Callable[[contexts.LogContext], dict[str, Any]]) -> None:
        self._live, self._convert = live, convert
        self._logs: object = None  # of the firing that the record is of
        self._record: dict[str, Any] = {}

    def of(self, ctx: contexts.LogContext) -> dict[str, Any]:
        if ctx.state is not self._live:
            return self._convert(ctx)
        if self._logs is not ctx.logs:
            self._logs, self._record = ctx.logs, self._convert(ctx)
        return self._record


def record_of(ctx: contexts.LogContext) -> dict[str, Any]:
    """Return a copy of the record, with the entries that Hugging Face's records have in addition."""
    record = {**ctx.logs, "epoch": ctx.state.epoch}
    record.pop(RANK_PEAK_MEM, None)  # a list, of which its integrations would warn at each record
    if ctx.kind == "final":
        record.setdefault("total_flos", ctx.state.total_flos)
    return record


class Batches:
    """Number of batches in an epoch of the run's data. Not iterable: reading would take batches from the training."""

    def __init__(self, feed: Any) -> None:
        self._feed = feed

    def __len__(self) -> int:
        """Batches per epoch on this rank."""
        count: int | None = self._feed.microbatches_per_epoch()
        if count is None:
            raise TypeError("the length of the data is unknown")
        return count

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> NoReturn:
        raise TypeError("a callback cannot read the training data; pass your own loader to the Trainer")


def loaders_of(given: Any) -> dict[str, Any]:
    """Return the evaluation loaders by the name of their set; an only loader under ``"eval"``."""
    if isinstance(given, Mapping):
        return dict(given)
    return {} if given is None else {"eval": given}
