"""Where a run stands, and what its callbacks wish: TrainerState and TrainerControl, with Hugging Face's field names."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, NamedTuple, TypedDict

from .errors import ConfigurationError
from .stateful.schema import Count, Must

Handler = Callable[[Any], "TrainerControl | None"]
"""One callback's method for one event: takes the context, may return a control whose flags are then taken over."""

_NOT_SAVED = {
    "num_input_tokens_seen",  # between two records each rank has its own estimate; the meter saves the count
    "max_steps",
    "num_train_epochs",
    "is_local_process_zero",
    "is_world_process_zero",
    "will_log",
    "will_evaluate",
    "will_save",
    "data_seconds",
    "clock",  # a component of its own
}


_CHECKPOINT = re.compile(r"checkpoints/step-\d{8,}")


class ClockState(TypedDict):
    seconds: Annotated[float, Must("0 or more", lambda seconds: seconds >= 0)]


class Clock:
    """Seconds of training, over all legs. Each rank's own differ a little, and rank 0's are saved."""

    state_compared = False
    state_schema = ClockState

    def __init__(self) -> None:
        self._before = 0.0  # in former legs
        self._started: float | None = None  # by the monotonic clock; None while nothing trains

    def start(self) -> None:
        self._started = time.monotonic()

    def stop(self) -> None:
        self._before, self._started = self.seconds(), None

    def seconds(self) -> float:
        return self._before + (0.0 if self._started is None else time.monotonic() - self._started)

    def stopped(self) -> Clock:
        """Another one, which stays where this one is now."""
        copy = Clock()
        copy._before = self.seconds()
        return copy

    def state_dict(self) -> ClockState:
        return {"seconds": self.seconds()}

    def load_state_dict(self, state: ClockState) -> None:
        self._before = state["seconds"]


class SavedTrainerState(TypedDict):
    """The fields of :class:`TrainerState` that are saved."""

    global_step: Count
    epoch: Annotated[float, Must("0 or more", lambda epoch: epoch >= 0)]
    samples_seen: Count
    total_flos: float
    best_metric: float | None
    best_global_step: Count
    best_model_checkpoint: Annotated[str, Must("checkpoints/step-…", _CHECKPOINT.fullmatch)] | None
    epoch_is_cut: bool
    evaluations_owed: list[str]


@dataclass(slots=True)
class TrainerState:
    """Where the run stands. Saved with each checkpoint, except for what belongs to the leg."""

    global_step: int = 0
    """Finished optimizer steps."""
    epoch: float = 0.0
    """Passes over the data, with the fraction of the current one where its length is known."""
    num_input_tokens_seen: int = 0
    """Tokens trained on, on all ranks. Exact at each record; in between, this rank's count stands for the others'."""
    samples_seen: int = 0
    """Samples trained on, on all ranks."""
    total_flos: float = 0.0
    """Floating point operations so far, if a callback counts them."""
    best_metric: float | None = None
    best_global_step: int = 0
    best_model_checkpoint: str | None = None
    """Relative to ``output_dir``, so that a moved run still finds it."""
    epoch_is_cut: bool = False
    """All ranks have agreed to end the epoch before its time: no more of its steps follow, in this leg or the next."""
    evaluations_owed: list[str] = field(default_factory=list)
    """The sets that this step's evaluation has not come to, since the leg was to end: the next one begins with them."""

    max_steps: int = -1
    """-1 where neither ``max_steps`` nor the length of the data says it."""
    num_train_epochs: float = 0.0
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    will_log: bool = False
    """This step's end is going to log; known from on_step_begin on, like the next two."""
    will_evaluate: bool = False
    will_save: bool = False

    data_seconds: float = 0.0
    """How long this rank has read the data of the present step, without waiting for other ranks."""

    clock: Clock = field(default_factory=Clock)

    state_schema: ClassVar[type[SavedTrainerState]] = SavedTrainerState

    def elapsed(self) -> float:
        """Seconds of training so far, over all legs."""
        return self.clock.seconds()

    def copy(self) -> TrainerState:
        """As it is now, to keep."""
        return replace(self, clock=self.clock.stopped(), evaluations_owed=list(self.evaluations_owed))

    def state_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_SAVED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class ControlRequests(NamedTuple):
    """What somebody wants to happen at a step's end."""

    log: bool = False
    evaluate: bool = False
    save: bool = False
    end_epoch: bool = False
    stop: bool = False
    abort: bool = False
    save_done: bool = False
    """A save in the background has come to its end, well or not."""

    def merge(self, others: ControlRequests) -> ControlRequests:
        return ControlRequests(*(mine or other for mine, other in zip(self, others, strict=True)))


NO_REQUESTS = ControlRequests()


class TrainerControl:
    """The callbacks' wishes. A handler sets a flag; the run acts on it at the step's end, on all ranks together.

    ``should_training_stop`` saves a checkpoint first; ``should_abort_without_save`` does not.
    """

    __slots__ = (
        "_aborting",
        "_stopping",
        "_thread",
        "current_handler",
        "should_epoch_stop",
        "should_evaluate",
        "should_log",
        "should_save",
        "stop_is_final",
        "stop_reason",
        "stopped_by",
    )

    should_log: bool
    should_evaluate: bool
    should_save: bool
    should_epoch_stop: bool
    stop_reason: str | None
    """Why training stops, in words, once somebody has asked for it."""
    stopped_by: str | None
    """The key of the callback that asked, ``signal``, ``clock``, or ``the program``."""
    stop_is_final: bool
    """Whether that is the run's end: started again, it trains no further until the user asks for more."""
    current_handler: Handler | None
    """The handler that is running; None between handlers. Events keep it, so that who sets a flag is known."""

    def __init__(self) -> None:
        self.current_handler = None
        self.clear()

    def clear(self) -> None:
        """No wishes: what a leg begins with."""
        self.should_log = self.should_evaluate = self.should_save = self.should_epoch_stop = False
        self._stopping = self._aborting = False
        self.stop_reason = self.stopped_by = None
        self._thread = threading.get_ident()  # handlers run on the thread that begins the leg
        self.stop_is_final = False

    @property
    def should_training_stop(self) -> bool:
        return self._stopping or self._aborting

    @should_training_stop.setter
    def should_training_stop(self, wish: bool) -> None:
        self._stopping = wish
        self._remember(wish, None, is_final=True)

    @property
    def should_abort_without_save(self) -> bool:
        return self._aborting

    @should_abort_without_save.setter
    def should_abort_without_save(self, wish: bool) -> None:
        self._aborting = wish
        self._remember(wish, None, is_final=True)

    def stop(self, reason: str, *, save: bool = True, final: bool = False, by: str | None = None) -> None:
        """Ask for the end of training, with a reason for people to read; ``save=False`` writes no checkpoint.

        ``final`` says that the training is judged to be over (it has converged, or diverged): started again, the run
        trains no further until the user asks for more. Else this leg ends, and the next one goes on. A bare flag, as
        other libraries' callbacks set it, is final. ``by`` says who asks; inside a handler it is known.
        """
        if save:
            self._stopping = True
        else:
            self._aborting = True
        self._remember(True, reason, by, is_final=final)

    def _remember(self, wish: bool, reason: str | None, by: str | None = None, *, is_final: bool) -> None:
        if not wish:
            if not self.should_training_stop:
                self.stop_reason = self.stopped_by = None
                self.stop_is_final = False
        elif self.stopped_by is None:
            self.stop_reason, self.stop_is_final = reason, is_final
            self.stopped_by = by or self._caller()

    def _caller(self) -> str:
        """The key of the callback whose handler sets a flag; code on another thread is the program's."""
        handler = self.current_handler
        return "the program" if handler is None or threading.get_ident() != self._thread else owner_of(handler)

    def requests(self) -> ControlRequests:
        """The flags as they are now. Another thread may set one at any moment, so only what is in here is acted on."""
        return ControlRequests(
            self.should_log,
            self.should_evaluate,
            self.should_save,
            self.should_epoch_stop,
            self._stopping,
            self._aborting,
        )

    def acknowledge(self, wishes: ControlRequests) -> None:
        """These are going to be fulfilled: forget those that are for once, keep in mind those to end training."""
        if wishes.log:
            self.should_log = False
        if wishes.evaluate:
            self.should_evaluate = False
        if wishes.save:
            self.should_save = False
        if wishes.end_epoch:
            self.should_epoch_stop = False
        self._stopping |= wishes.stop
        self._aborting |= wishes.abort

    def merge_from(self, returned: object) -> None:
        """Take over the flags of a control that a handler returned.

        Raises:
            ConfigurationError: if it is something else.
        """
        if returned is self:
            return
        control = returned if isinstance(returned, TrainerControl) else _translated(returned)
        flags = control.requests()
        self.should_log, self.should_evaluate, self.should_save, self.should_epoch_stop = flags[:4]
        self._stopping, self._aborting = flags.stop, flags.abort
        reason, by, is_final = control.stop_reason, control.stopped_by, control.stop_is_final
        self._remember(self.should_training_stop, reason, by, is_final=is_final)


def _translated(returned: Any) -> TrainerControl:
    """Another library's control with Hugging Face's flags; ``should_abort_without_save`` may be missing."""
    control = TrainerControl()
    try:
        for flag in ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop"):
            setattr(control, flag, bool(getattr(returned, flag)))
    except AttributeError:
        raise ConfigurationError(
            f"a handler returned a {type(returned).__name__}; it may return None or a TrainerControl"
        ) from None
    control.should_abort_without_save = bool(getattr(returned, "should_abort_without_save", False))
    return control


def method_of(handler: Handler, name: str) -> str:
    """Owner and method, to be named to people. ``name`` is the event's; a foreign method may have another."""
    method = getattr(handler, "__wrapped__", None)
    return f"{owner_of(handler)}.{getattr(method, '__name__', name)}"


def owner_of(handler: Handler) -> str:
    """The key of the callback that a handler belongs to, or the function's name."""
    owner = getattr(handler, "__self__", handler)
    return str(getattr(owner, "key", getattr(owner, "__name__", type(owner).__name__)))
