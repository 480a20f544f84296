"""What Hugging Face's callbacks see of a run: its settings, state, records and loaders in their form."""

from __future__ import annotations

import json
import math
import socket
import sys
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, Field, fields, make_dataclass
from datetime import datetime
from enum import Enum, StrEnum
from itertools import chain, count
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypedDict

from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.events import contexts
from dalsegno.events.callback import Callback
from dalsegno.policies.triggers import AnyTrigger, Every, SaveTrigger
from dalsegno.state import TrainerState
from dalsegno.stateful.schema import Must
from dalsegno.system import filesystem

_NEVER = sys.maxsize  # steps: none is a multiple of it

_FIXED: dict[str, Any] = {
    **dict.fromkeys(("auto_find_batch_size", "do_predict", "eval_on_start", "ignore_data_skip"), False),
    **dict.fromkeys(("logging_nan_inf_filter", "overwrite_output_dir", "push_to_hub", "remove_unused_columns"), False),
    **dict.fromkeys(("save_on_each_node", "save_only_model"), False),
    **dict.fromkeys(("do_train", "log_on_each_node"), True),
    **dict.fromkeys(("deepspeed", "hub_model_id", "hub_private_repo", "hub_token", "resume_from_checkpoint"), None),
    "eval_delay": 0,
    "hub_strategy": "every_save",
    "include_num_input_tokens_seen": "no",
    "log_level": "passive",
    "past_index": -1,
    "project": "huggingface",
}
"""Settings of features that only Hugging Face's Trainer has, with the values that turn them off."""


_LIVE: dict[str, Callable[[Any], Any]] = {
    "device": lambda args: device_of(args._model),
    "gradient_accumulation_steps": lambda args: args._args.accumulation.at(args._state.global_step),  # of the next step
    "n_gpu": lambda args: int(args.device.type != "cpu"),
    "_n_gpu": attrgetter("n_gpu"),
}
"""Settings that change during a run."""


class Strategy(StrEnum):
    """Compares equal to Hugging Face's members, and to plain strings."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


class Arguments:
    """Hugging Face's ``TrainingArguments``, made from dalsegno's.

    Attributes that a callback sets are visible to callbacks of this dialect only. A schedule that is never due has the
    strategy ``"no"``, and so many steps that no step is a multiple of them.
    """

    def __init__(self, context: contexts.Context | None = None, *, evaluates: bool = False, **values: Any) -> None:
        """``evaluates``: whether there is an evaluation set. Without a context ``values`` are all that there is, as
        :func:`dataclasses.replace` needs."""
        if context is None:
            vars(self).update(values)
            return
        args = context.args
        self._args = args
        self._model = context.model
        self._state = context.state
        self.output_dir = str(args.directory)
        self.logging_dir = self._new_logging_dir()
        """A separate one for each leg."""
        self.logging_strategy, self.logging_steps = _schedule(args.logging)
        self.eval_strategy, self.eval_steps = _schedule(args.evaluation if evaluates else Every())
        self.save_strategy, self.save_steps = _schedule(args.saving)
        self.evaluation_strategy = self.eval_strategy  # its name until 2024
        self.do_eval = self.eval_strategy != Strategy.NO
        self.metric_for_best_model = args.metric_for_best_model or ("loss" if args.load_best_model_at_end else None)
        self.greater_is_better = args.best_is_greater if self.metric_for_best_model else None
        self.disable_tqdm = bool(args.disable_tqdm)
        self.world_size = collectives.world_size()
        self.process_index = collectives.rank()
        self.local_process_index = self.local_rank = collectives.local_rank()
        self.should_save = self.should_log = self.process_index == 0
        self.parallel_mode = "distributed" if self.world_size > 1 else "not_parallel"
        self.train_batch_size = args.per_device_train_batch_size
        self.eval_batch_size = args.per_device_eval_batch_size

    def unused_logging_dir(self) -> str:
        """Return :attr:`logging_dir`, or a new one if an earlier leg has used that."""
        return self._new_logging_dir() if Path(self.logging_dir).exists() else self.logging_dir

    def _new_logging_dir(self) -> str:
        name = f"{datetime.now():%b%d_%H-%M-%S}_{socket.gethostname()}"
        names = chain([name], (f"{name}-{number}" for number in count(2)))
        folders = (self._args.directory / "runs" / each for each in names)
        return str(next(folder for folder in folders if not folder.exists()))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_args", "_model", "_state"):
            raise AttributeError(name)
        if name in _LIVE:
            return _LIVE[name](self)
        if hasattr(self, "_args") and hasattr(self._args, name):
            return getattr(self._args, name)
        if name in _FIXED:
            return _FIXED[name]
        return _their_default(name)

    @property
    def __dataclass_fields__(self) -> dict[str, Field[Any]]:
        """So that ``dataclasses.fields``, ``asdict`` and ``replace`` work as with Hugging Face's class."""
        return {field.name: field for field in fields(self._as_dataclass())}

    @property
    def __dataclass_params__(self) -> Any:
        """For ``pprint``."""
        return vars(self._as_dataclass())["__dataclass_params__"]

    def _as_dataclass(self) -> type:
        return make_dataclass("Settings", [name for name in self.to_dict() if name.isidentifier()])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the real class of transformers, if that is imported: W&B's callback builds a Trainer of the copy.

        It has the run's name, directory and device, and reports to nothing.
        """
        theirs = getattr(sys.modules.get("transformers.training_args"), "TrainingArguments", None)
        if theirs is None:
            return copy(self)
        return theirs(
            self.output_dir,
            run_name=self._args.run_name,
            use_cpu=str(self.device) == "cpu",
            report_to=[],
            disable_tqdm=True,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as JSON values."""
        values = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        own = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
        settings = self._args.to_dict() if hasattr(self, "_args") else {}
        return {**_FIXED, **settings, **own, "device": str(self.device), "n_gpu": self.n_gpu}

    def __repr__(self) -> str:
        return f"TrainingArguments({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return all settings as numbers, booleans and strings, as TensorBoard's hyperparameters need."""
        return {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in self.to_dict().items()
        }


def _schedule(when: SaveTrigger) -> tuple[Strategy, int]:
    """Return the nearest strategy and steps of Hugging Face's. Triggers by time, or at the end, have no steps."""
    parts = when.parts if isinstance(when, AnyTrigger) else (when,)
    periods = [part for part in parts if isinstance(part, Every)]
    steps = [period.steps for period in periods if period.steps]
    if steps or not when:
        return (Strategy.STEPS, min(steps)) if steps else (Strategy.NO, _NEVER)
    if any(period.epochs for period in periods):
        return Strategy.EPOCH, _NEVER
    return (Strategy.BEST if when.on_best else Strategy.STEPS), _NEVER


def _their_default(name: str) -> Any:
    """Return the default of transformers' own ``TrainingArguments``, if transformers is imported. Raises AttributeError
    if there is none, as transformers raises."""
    theirs = getattr(sys.modules.get("transformers.training_args"), "TrainingArguments", None)
    field = getattr(theirs, "__dataclass_fields__", {}).get(name)
    if field is not None and field.default is not MISSING:
        return field.default
    if field is not None and field.default_factory is not MISSING:
        return field.default_factory()
    raise AttributeError(f"dalsegno has no counterpart of args.{name}, which a callback in Hugging Face's style reads")


_FIELDS = (
    *("epoch", "global_step", "max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size"),
    *("num_train_epochs", "num_input_tokens_seen", "total_flos", "log_history", "best_metric", "best_global_step"),
    *("best_model_checkpoint", "is_local_process_zero", "is_world_process_zero", "is_hyper_param_search"),
    *("trial_name", "trial_params", "stateful_callbacks"),
)
"""Fields of Hugging Face's class, so that its ``load_from_json`` reads what :meth:`State.save_to_json` writes."""


class State:
    """Reads and writes the run's state; keeps fields that the run's state lacks, for callbacks of this dialect only."""

    def __init__(self, state: TrainerState, args: Arguments, log_history: list[dict[str, Any]]) -> None:
        self._state = state
        self._args = args
        self.log_history = log_history
        self.logging_steps = args.logging_steps
        self.eval_steps = args.eval_steps
        self.save_steps = args.save_steps
        self.train_batch_size = args.train_batch_size
        self.is_hyper_param_search = False
        self.trial_name: str | None = None
        self.trial_params: dict[str, Any] | None = None
        self.stateful_callbacks: dict[str, Any] = {}
        self.steps_set: int | None = None
        """``max_steps`` that a callback has set."""

    def __repr__(self) -> str:
        return f"TrainerState({', '.join(f'{name}={getattr(self, name)!r}' for name in _FIELDS)})"

    @property
    def max_steps(self) -> int:
        """``sys.maxsize`` where the data's length is unknown: callbacks compare this with the step."""
        return self._state.max_steps if self._state.max_steps > 0 else sys.maxsize

    @max_steps.setter
    def max_steps(self, steps: int) -> None:
        """A number below the run's ends it there; a larger one only changes what callbacks read."""
        self._state.max_steps = self.steps_set = steps

    @property
    def num_train_epochs(self) -> int:
        return math.ceil(self._state.num_train_epochs)

    @property
    def best_model_checkpoint(self) -> str | None:
        best = self._state.best_model_checkpoint
        return None if best is None else str(Path(self._args.output_dir) / best)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._state, name)

    def compute_steps(self, args: Any, max_steps: int) -> None:
        """Convert steps given as a fraction of ``max_steps`` into numbers of steps."""
        for kind in ("logging_steps", "eval_steps", "save_steps"):
            steps = getattr(args, kind)
            if steps is not None:
                setattr(self, kind, math.ceil(max_steps * steps) if steps < 1 else steps)

    def save_to_json(self, json_path: str) -> None:
        values = {name: getattr(self, name) for name in _FIELDS}
        Path(json_path).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _delegated(name: str) -> property:
    def write(state: Any, value: Any) -> None:
        setattr(state._state, name, value)

    return property(attrgetter(f"_state.{name}"), write)


for _field in fields(TrainerState):
    if _field.name not in vars(State):
        setattr(State, _field.name, _delegated(_field.name))


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
