"""A run's progress and its callbacks' requests: TrainerState and TrainerControl, with Hugging Face's field names."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypedDict, get_args

from .errors import ConfigurationError
from .policies.recovery import RollbackRequest
from .stateful.schema import Count, Must

Handler = Callable[[Any], "TrainerControl | None"]
"""A callback's method for one event: takes the context, may return a control whose flags are then copied."""

_CHECKPOINT = re.compile(r"checkpoints/step-\d{8,}")


class ClockState(TypedDict):
    seconds: Annotated[float, Must("0 or more", lambda seconds: seconds >= 0)]


class Clock:
    """Seconds of training over all legs, which every rate is measured by. The ranks' clocks differ slightly; rank 0's
    is saved."""

    state_compared = False
    state_varies = ("seconds",)
    state_schema = ClockState

    def __init__(self) -> None:
        self._before = 0.0  # seconds in earlier legs
        self._started: float | None = None  # None while training is not running

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._before, self._started = self.seconds(), None

    def seconds(self) -> float:
        return self._before + (0.0 if self._started is None else time.perf_counter() - self._started)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time in the ``with`` block: it is not spent on training."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def stopped(self) -> Clock:
        """Return a stopped copy that keeps the present value."""
        copy = Clock()
        copy._before = self.seconds()
        return copy

    def state_dict(self) -> ClockState:
        return {"seconds": self.seconds()}

    def load_state_dict(self, state: ClockState) -> None:
        self._before = state["seconds"]


_PLURAL = ("data", "random numbers", "gradients")
Verdict = Literal["exact", "not proven", "changed", "differs"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""From the best to the worst."""

CAUSES = {
    "data": "their order or contents depend on something that no checkpoint contains",
    "random numbers": "they are drawn at other places, or from a generator that no checkpoint contains",
    "loss": "data and random numbers are equal, so a state that no checkpoint contains has an effect, or the script is "
    "another",
    "gradients": "the loss is equal, so they are summed in another order, or changed by a state that no checkpoint "
    "contains",
    "gradient norm": "the loss is equal, so gradients are summed in another order, or changed by a state that no "
    "checkpoint contains",
    "learning rate": "the loss is equal, so something that no checkpoint contains sets the rate",
    "record": "the steps are equal, so a callback has a state that no checkpoint contains",
}
"""What of a step can differ, in the order in which it happens, each with what that means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeProof:
    """Comparison of the steps that a resumed leg repeated with those of the leg before it.

    Steps are numbers of finished optimizer steps.
    """

    verdict: Verdict
    """``exact``: equal bit for bit; ``why`` has what is not, but had no effect on them. ``differs``: not, without a
    known reason. ``changed``: not, and ``why`` has the reason, such as a changed setting. ``not proven``: nothing could
    be compared, for the reason in ``why``."""
    first_step: int | None = None
    """First step that was repeated; None if none was."""
    last_step: int | None = None
    """Last step that was repeated."""
    every: int = 1
    """One in how many of these steps was compared."""
    differs_at: int | None = None
    """First compared step that differs; None if none does."""
    what: str | None = None
    """What of this step differs first: one of :data:`CAUSES`."""
    why: str | None = None
    unsaved: str | None = None
    """What training changes and no checkpoint contains, as far as it was found; it may take effect in later steps."""

    @property
    def line(self) -> str:
        """The verdict in a line."""
        unsaved = f"training changes {self.unsaved}, which no checkpoint contains" if self.unsaved else ""
        if self.verdict == "not proven":
            return f"not proven: {self.why}"
        if self.verdict == "exact":
            compared = "" if self.every == 1 else f" (one in {self.every} compared)"
            but = f"; without an effect on them, {self.why}" if self.why else ""
            but += f"; the later steps are not proven, since {unsaved}" if unsaved else ""
            return f"resumed exactly: steps {self.first_step} to {self.last_step} repeated bit for bit{compared}{but}"
        reason = ": " + "; ".join(filter(None, [self.why, unsaved])) if self.why or unsaved else ""
        kind = "not resumed exactly" if self.verdict == "differs" else "not repeated bit for bit"
        return f"{kind}: {self.what} of step {self.differs_at} differ{'' if self.what in _PLURAL else 's'}{reason}"


class GivenUp(TypedDict):
    """A callback's judgement that training is over."""

    by: str
    """Key of the callback."""
    why: str | None
    diverged: bool
    goal: dict[str, float]
    """``max_steps`` and ``num_train_epochs`` at that time: raising one of them continues the run."""


class SavedTrainerState(TypedDict):
    """The saved fields of :class:`TrainerState`."""

    global_step: Count
    epoch: Annotated[float, Must("0 or more", lambda epoch: epoch >= 0)]
    samples_seen: Count
    total_flos: float
    best_metric: float | None
    best_global_step: Count
    best_model_checkpoint: Annotated[str, Must("checkpoints/step-…", _CHECKPOINT.fullmatch)] | None
    epoch_is_cut: bool
    evaluations_owed: list[str]
    given_up: GivenUp | None
    save_owed: Count | None


@dataclass(slots=True)
class TrainerState:
    """Progress of the run. Checkpoints contain the fields of :class:`SavedTrainerState`; the others are the leg's."""

    global_step: int = 0
    """Finished optimizer steps."""
    epoch: float = 0.0
    """Passes over the data, including the fraction of the current pass if its length is known."""
    num_input_tokens_seen: int = 0
    """Tokens trained on, on all ranks. Exact at each record; in between, extrapolated from this rank's count. Not saved
    here: the meter saves the exact count."""
    samples_seen: int = 0
    """Samples trained on, on all ranks."""
    total_flos: float = 0.0
    """Floating point operations so far, if a callback counts them; else 0."""
    best_metric: float | None = None
    best_global_step: int = 0
    best_model_checkpoint: str | None = None
    """Path relative to ``output_dir``, so that it stays valid when the run is moved."""
    epoch_is_cut: bool = False
    """All ranks agreed to end the epoch early: neither this leg nor the next one runs its remaining steps."""
    evaluations_owed: list[str] = field(default_factory=list)
    """Evaluation sets that this step left out because the leg was ending; the next leg evaluates them first."""
    given_up: GivenUp | None = None
    """Set once all ranks have agreed to stop because of it, so that the checkpoint of that step contains it."""
    save_owed: int | None = None
    """Step of a checkpoint whose on_save has not fired yet, although an uninterrupted run saves there, too; a leg that
    resumes from here fires it. None in the checkpoint that only the end of a leg has caused."""

    max_steps: int = -1
    """-1 if neither ``max_steps`` nor the length of the data determines it."""
    num_train_epochs: float = 0.0
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    will_log: bool = False
    """Whether the end of this step logs; known from on_step_begin on, as are the next two fields."""
    will_evaluate: bool = False
    will_save: bool = False

    data_seconds: float = 0.0
    """Seconds that this rank spent reading the data of the current step, without waiting for other ranks."""

    resume_proof: ResumeProof | None = None
    """Whether the steps that this leg repeated are those of the leg before it; None until that is known, and in a leg
    that did not resume."""

    clock: Clock = field(default_factory=Clock)

    state_schema: ClassVar[type[SavedTrainerState]] = SavedTrainerState

    def elapsed(self) -> float:
        """Return the seconds of training so far, over all legs."""
        return self.clock.seconds()

    def copy(self) -> TrainerState:
        """Return a snapshot of the present values."""
        return replace(self, clock=self.clock.stopped(), evaluations_owed=list(self.evaluations_owed))

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SavedTrainerState.__annotations__}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class ControlRequests(NamedTuple):
    """Actions requested for the end of a step."""

    log: bool = False
    evaluate: bool = False
    save: bool = False
    end_epoch: bool = False
    stop: bool = False
    abort: bool = False
    save_done: bool = False
    """A background save has finished, successfully or not."""
    commands: bool = False
    """Rank 0 has accepted commands that wait for their effect."""
    roll_back: bool = False
    lease_lost: bool = False
    """Another process has taken the run over: nothing more may be written."""
    save_in_memory: bool = False
    """By its schedule only."""

    def merge(self, others: ControlRequests) -> ControlRequests:
        if self is NO_REQUESTS or others is NO_REQUESTS:
            return others if self is NO_REQUESTS else self
        return ControlRequests(*(mine or other for mine, other in zip(self, others, strict=True)))


NO_REQUESTS = ControlRequests()


class StopRequest(NamedTuple):
    """Why training is to end, and who requested it."""

    reason: str | None
    """Human-readable; None if only the flag was set."""
    by: str
    """Key of a callback, or ``signal``, ``clock`` or ``the program``."""
    is_final: bool
    """Whether the stop ends the run: after a restart the run trains no further until the user asks for more."""
    diverged: bool = False
    """Whether training has diverged."""

    def given_up(self, max_steps: int, num_train_epochs: float) -> GivenUp | None:
        """What the run's checkpoint contains of a stop that ends the run; None if it ends the leg only."""
        goal = {"max_steps": max_steps, "num_train_epochs": num_train_epochs}
        return GivenUp(by=self.by, why=self.reason, diverged=self.diverged, goal=goal) if self.is_final else None


class Misnomer:
    """An attribute of other libraries' objects: reading or setting it raises an AttributeError with what to do here."""

    def __init__(self, advice: str) -> None:
        self._advice = advice

    def __get__(self, owner: object, kind: type) -> Self:
        if owner is None:
            return self
        raise AttributeError(f"{kind.__name__} has no such attribute; {self._advice}")

    def __set__(self, owner: object, value: object) -> None:
        self.__get__(owner, type(owner))


@dataclass(slots=True, eq=False)
class TrainerControl:
    """The callbacks' requests. A handler sets a flag; all ranks act on it together at the end of the step.

    ``should_training_stop`` saves a checkpoint first; ``should_abort_without_save`` does not.
    """

    _: KW_ONLY
    can_roll_back: bool = False
    """Whether the run has a ``RecoveryPolicy``."""
    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False
    should_epoch_stop: bool = False
    should_stop = stop_training = Misnomer("set should_training_stop, or call stop(reason)")
    should_checkpoint = Misnomer("set should_save")
    stop_request: StopRequest | None = None
    """The first request to stop; None until there is one."""
    rollback_request: RollbackRequest | None = None
    """The first request to go back to a checkpoint since the last rollback; None if there is none."""
    handler: Handler | None = None
    """The handler that runs: set by the dispatcher to attribute flags to a callback."""
    _stopping: bool = field(default=False, init=False)
    _aborting: bool = field(default=False, init=False)
    _thread: int = field(default_factory=threading.get_ident, init=False)  # that runs the handlers

    def clear(self) -> None:
        """Reset all requests, at the start of a leg."""
        self.clear_timeline()
        self._stopping = self._aborting = False
        self.stop_request = None
        self._thread = threading.get_ident()

    def clear_timeline(self) -> None:
        """Reset the requests of an abandoned timeline: all but those to stop."""
        self.should_log = self.should_evaluate = self.should_save = self.should_epoch_stop = False
        self.rollback_request = None

    @property
    def stop_reason(self) -> str | None:
        """Human-readable reason for the stop, once one is requested."""
        return self.stop_request.reason if self.stop_request else None

    @property
    def stopped_by(self) -> str | None:
        """Key of the callback that requested the stop, or ``signal``, ``clock`` or ``the program``."""
        return self.stop_request.by if self.stop_request else None

    @property
    def should_training_stop(self) -> bool:
        return self._stopping or self._aborting

    @should_training_stop.setter
    def should_training_stop(self, value: bool) -> None:
        self._stopping = _flag("should_training_stop", value)
        self._set(value)

    @property
    def should_abort_without_save(self) -> bool:
        return self._aborting

    @should_abort_without_save.setter
    def should_abort_without_save(self, value: bool) -> None:
        self._aborting = _flag("should_abort_without_save", value)
        self._set(value)

    def stop(
        self, reason: str, *, save: bool = True, final: bool = False, diverged: bool = False, by: str | None = None
    ) -> None:
        """Request the end of training, for a human-readable reason; ``save=False`` writes no checkpoint.

        ``final`` means that training is complete: after a restart the run trains no further until the user asks for
        more. ``diverged`` means the same, because training has failed: the exit status is then 3. Otherwise only this
        leg ends, and the next one resumes. Setting the bare flag, as other libraries' callbacks do, is final. ``by``
        names the requester; inside a handler it is detected.
        """
        if save:
            self._stopping = True
        else:
            self._aborting = True
        self._remember(StopRequest(reason, by or self._caller(), final or diverged, diverged))

    def roll_back(
        self,
        reason: str,
        *,
        steps: int | None = None,
        to: int | None = None,
        skip: int | Literal["policy"] | None = "policy",
        by: str | None = None,
    ) -> None:
        """Request that the run goes back to a checkpoint at the end of this step, for a human-readable reason.

        The run's ``RecoveryPolicy`` decides what is not given here, and ends the run once its budget is used up. For
        ``steps``, ``to`` and ``skip`` see :class:`RollbackRequest`. ``by`` names the requester, as in :meth:`stop`.

        Raises:
            ConfigurationError: if the run has no policy, or for an invalid value.
        """
        if not self.can_roll_back:
            raise ConfigurationError(
                "roll_back(): the run has no policy for it; pass TrainingArguments(recovery=RecoveryPolicy(…))"
            )
        request = RollbackRequest(reason, by or self._caller(), steps, to, skip)
        self.rollback_request = self.rollback_request or request

    def _set(self, value: bool) -> None:
        """Another library's flag was set or cleared: a stop by it is final."""
        if value:
            self._remember(StopRequest(None, self._caller(), is_final=True))
        elif not self.should_training_stop:
            self.stop_request = None

    def _remember(self, request: StopRequest) -> None:
        self.stop_request = self.stop_request or request

    def _caller(self) -> str:
        """Key of the callback whose handler sets a flag. A flag set on another thread is the program's."""
        handler = self.handler
        return "the program" if handler is None or threading.get_ident() != self._thread else owner_of(handler)

    def requests(self) -> ControlRequests:
        """Return the present flags; :data:`NO_REQUESTS` if none is set. Another thread may set one at any time, so
        callers act on this snapshot only."""
        requests = (
            self.should_log,
            self.should_evaluate,
            self.should_save,
            self.should_epoch_stop,
            self._stopping,
            self._aborting,
        )
        rolls_back = self.rollback_request is not None
        return ControlRequests(*requests, roll_back=rolls_back) if rolls_back or any(requests) else NO_REQUESTS

    def acknowledge(self, requests: ControlRequests) -> None:
        """Clear the one-time flags that are about to be fulfilled; keep stop and abort set."""
        if requests.log:
            self.should_log = False
        if requests.evaluate:
            self.should_evaluate = False
        if requests.save:
            self.should_save = False
        if requests.end_epoch:
            self.should_epoch_stop = False
        self._stopping |= requests.stop
        self._aborting |= requests.abort

    def merge_from(self, returned: object) -> None:
        """Copy the flags of a control that a handler returned.

        Raises:
            ConfigurationError: if ``returned`` is not a control.
        """
        if returned is self:
            return
        control = returned if isinstance(returned, TrainerControl) else _from_foreign_control(returned)
        flags = control.requests()
        self.should_log, self.should_evaluate, self.should_save, self.should_epoch_stop = flags[:4]
        self._stopping, self._aborting = flags.stop, flags.abort
        self.rollback_request = self.rollback_request or control.rollback_request
        if control.stop_request is not None:
            self._remember(control.stop_request)
        else:
            self._set(self.should_training_stop)


def _flag(name: str, value: object) -> bool:
    if isinstance(value, str):
        raise ConfigurationError(f"control.{name}={value!r}; needs True or False")
    return bool(value)


def _from_foreign_control(returned: Any) -> TrainerControl:
    """Convert another library's control with Hugging Face's flags; ``should_abort_without_save`` is optional."""
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
    """Return "owner.method" for messages. ``name`` is the event's method; an adapted callback's may differ."""
    method = getattr(handler, "__wrapped__", None)
    return f"{owner_of(handler)}.{getattr(method, '__name__', name)}"


def owner_of(handler: Handler) -> str:
    """Return the key of the callback that a handler belongs to, or the function's name."""
    owner = getattr(handler, "__self__", handler)
    return str(getattr(owner, "key", getattr(owner, "__name__", type(owner).__name__)))
