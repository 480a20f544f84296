"""CommandExecutor: carries out commands at step boundaries, on all ranks, and repeats them after a resume.

Rank 0 accepts them. That some are waiting is one flag of the reduction in which the ranks synchronize their requests;
only then are they recorded in ``control.jsonl``, broadcast, and carried out, before the step's records, evaluations and
save. A leg that resumes from a checkpoint before that step knows from the start what to repeat, and where.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from dalsegno.args import TrainingArguments
from dalsegno.control.commands import LEARNING_RATE, SETTINGS, Command, parse_command, with_settings
from dalsegno.control.journal import Journal, JournalEntry
from dalsegno.control.queue import CommandQueue
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError, SaveFailed
from dalsegno.state import NO_REQUESTS, ControlRequests

from .command_plan import CommandPlan, describe_plan, plan_commands
from .learning_rate import check_scalable, present_rate, scale_rates
from .parts import RunParts
from .settings import RecordedSettings

logger = logging.getLogger("dalsegno")

_WAITING = ControlRequests(commands=True)
_REQUESTS = {
    "log": ControlRequests(log=True),
    "evaluate": ControlRequests(evaluate=True),
    "save_checkpoint": ControlRequests(save=True),
    "graceful_stop": ControlRequests(stop=True),
    "save_and_stop": ControlRequests(stop=True),
    "abort": ControlRequests(abort=True),
}


class CommandExecutor:
    """Lives as long as the run's parts. ``queue`` accepts commands while a leg is running."""

    def __init__(self, parts: RunParts, settings: RecordedSettings, *, evaluates: bool) -> None:
        self._args = parts.args
        self._state = parts.state
        self._control = parts.control
        self._dispatcher = parts.dispatcher
        self._optimizer = parts.optimizer
        self._schedulers = parts.schedulers
        self._settings = settings
        self._evaluates = evaluates
        self.queue = CommandQueue(Journal(parts.args.directory), parts.args, self._check, rank=collectives.rank())
        self._plan = CommandPlan()
        self._switched_off: frozenset[str] = frozenset()  # as of the step's end
        self._acted: list[JournalEntry] = []  # at the present step; on rank 0
        self._script: dict[str, Any] = {}  # the script's values of settings that commands have changed

    # -- the leg ------------------------------------------------------------------------------------------------------

    def restore(self, step: int) -> None:
        """Put in force what commands had set by ``step``, from which a leg continues. Collective."""
        with self.restoring(step, goes_back=False):
            pass

    @contextmanager
    def restoring(self, step: int, *, goes_back: bool) -> Iterator[None]:
        """As :meth:`restore`, around the load of a checkpoint, which compares the settings in force. If that fails, no
        file is changed. Collective.

        ``goes_back``: the user has chosen this step; commands after it are of an abandoned timeline.
        """
        rewind_to = step if goes_back else None
        script = self._script_values()
        plan = self._put_in_force(step, rewind_to)
        yield
        collectives.from_rank_zero(partial(self._resume, rewind_to))
        if collectives.rank() == 0 and (text := describe_plan(plan, script)):
            is_surprising = plan.notes or "max_steps" in plan.settings
            logger.log(logging.WARNING if is_surprising else logging.INFO, "commands of earlier legs:\n  %s", text)

    def go_back(self, step: int) -> None:
        """Put in force what commands had set by ``step``, to which the leg goes back; later ones are repeated. Commands
        that wait for their effect still do. Collective."""
        self.undo_settings()
        self._put_in_force(step, None)

    def _put_in_force(self, step: int, rewind_to: int | None) -> CommandPlan:
        plan = self._plan = collectives.from_rank_zero(partial(self._planned, step, rewind_to))
        self._change_settings(plan.settings)
        self._settings.plan_steps()
        self._switched_off = frozenset(plan.switched_off)
        self._dispatcher.switch_off(self._switched_off)
        return plan

    def _planned(self, step: int, rewind_to: int | None) -> CommandPlan:
        """On rank 0."""
        return plan_commands(self.queue.read(rewind_to), step, self._args, self._script_values(), self._parsed)

    def _resume(self, rewind_to: int | None) -> None:
        """On rank 0. Raises SaveFailed if ``control.jsonl`` cannot be written."""
        try:
            self.queue.resume(rewind_to, self._plan.overridden)
        except OSError as error:
            raise SaveFailed(f"control.jsonl could not be written: {error}; nothing is trained") from error

    def undo_settings(self) -> None:
        """Restore what the script has set up."""
        for name, value in self._script.items():
            setattr(self._args, name, value)
        self._script.clear()
        self._dispatcher.switch_off(())

    def open(self) -> None:
        """Accept commands."""
        self.queue.open()

    def close(self) -> None:
        """Accept no more: the leg has decided to end here."""
        self._resolve()
        self.queue.close(self._state.global_step)

    # -- the step's end -----------------------------------------------------------------------------------------------

    def poll(self) -> ControlRequests:
        """A source for :class:`ControlSync`."""
        return _WAITING if self.queue.is_waiting else NO_REQUESTS

    def are_due(self, requests: ControlRequests) -> bool:
        """Whether any command acts at the end of the present step; the same on all ranks."""
        return requests.commands or self._state.global_step in self._plan.repeated

    def act(self, requests: ControlRequests) -> ControlRequests:
        """Carry out the commands that act at the present step; returns what they request of its end. Collective."""
        wanted = NO_REQUESTS
        for entry in self._plan.repeated.pop(self._state.global_step, ()):
            wanted = wanted.merge(self._carry_out(entry, "again, as in an earlier leg"))
        if requests.commands:
            superseded: dict[str, list[str]] = {}
            accepted = collectives.from_rank_zero(self._accept)
            for entry in accepted:
                for id_, names in self._plan.supersede(entry).items():
                    superseded.setdefault(id_, []).extend(names)
                wanted = wanted.merge(self._carry_out(entry, "accepted"))
            if collectives.rank() == 0:
                self.queue.override(superseded)
                self._acted = accepted
        return wanted

    def end_step(self) -> None:
        """Switch callbacks off and on, after the last event of the step, so that no callback sees a part of one; then
        resolve the tickets of the commands that have acted."""
        if self._switched_off is not self._dispatcher.switched_off:
            self._dispatcher.switch_off(self._switched_off)
        if self._acted:
            self._resolve()

    def _resolve(self) -> None:
        self.queue.resolve(self._acted)
        self._acted = []

    def _accept(self) -> list[JournalEntry]:
        """On rank 0: record which of the waiting commands act now."""
        acting: list[JournalEntry] = []
        refused: dict[str, str] = {}
        args = self._args
        for entry in self.queue.waiting():
            try:
                command = self._parsed(entry, args)
                self._check_rate(command)
            except ConfigurationError as error:
                refused[entry.id] = str(error)
                continue
            entry.script = {name: value for name, value in self._script_values().items() if name in command.data}
            args = with_settings(args, command.data) if command.name == "set" else args
            acting.append(entry)
        if refused:
            self.queue.refuse(refused)
        return self.queue.record(acting, self._state.global_step)

    def _parsed(self, entry: JournalEntry, args: TrainingArguments) -> Command:
        """Raises ConfigurationError if the command can no longer be carried out."""
        command = parse_command(entry.command, entry.data, args)
        self._check(command)
        return command

    def _check(self, command: Command) -> None:
        """Raises ConfigurationError for a command that this run cannot carry out."""
        if command.name == "evaluate" and not self._evaluates:
            raise ConfigurationError("evaluate: this run has no evaluation set")
        if "eval_steps" in command.data and not self._evaluates:
            raise ConfigurationError("set eval_steps: has no effect, since this run has no evaluation set")
        if command.name == "switch":
            self._dispatcher.check_observes(command.data["callback"])
        if LEARNING_RATE in command.data:
            check_scalable(self._optimizer, self._schedulers)

    def _check_rate(self, command: Command) -> None:
        """Raises ConfigurationError for a learning rate to which no factor leads."""
        rate, present = command.data.get(LEARNING_RATE), present_rate(self._optimizer)
        if isinstance(rate, (int, float)) and (present == 0 or not 0 < rate / present < math.inf):
            raise ConfigurationError(
                f"{LEARNING_RATE}={rate:g}: after step {self._state.global_step} the schedule's value is {present:g}, "
                "which no factor turns into this one"
            )

    def _carry_out(self, entry: JournalEntry, why: str) -> ControlRequests:
        name, data = entry.command, entry.data
        if collectives.rank() == 0:
            logger.info("at step %d, by %s: %s (%s)", self._state.global_step, entry.by, Command(name, data), why)
        if name == "set":
            self._set(data)
        elif name == "switch":
            key = {data["callback"]}
            self._switched_off = self._switched_off - key if data["on"] else self._switched_off | key
        elif name in ("graceful_stop", "save_and_stop", "abort"):
            self._control.stop(f"command {name}", save=name != "abort", by=entry.by)
        return _REQUESTS.get(name, NO_REQUESTS)

    def _set(self, data: Mapping[str, Any]) -> None:
        self._change_settings({name: value for name, value in data.items() if name in SETTINGS})
        if "max_steps" in data:
            self._settings.plan_steps()
        if LEARNING_RATE in data:
            rate = data[LEARNING_RATE]
            factor = rate["factor"] if isinstance(rate, Mapping) else rate / present_rate(self._optimizer)
            scale_rates(self._optimizer, self._schedulers, factor)

    def _change_settings(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._script.setdefault(name, getattr(self._args, name))
            setattr(self._args, name, value)

    def _script_values(self) -> dict[str, Any]:
        """The script's value of each setting that a command may change, if it has an effect."""
        names = [*SETTINGS, LEARNING_RATE] if self._settings.sets_learning_rate else [*SETTINGS]
        return {name: self._script.get(name, getattr(self._args, name)) for name in names}
