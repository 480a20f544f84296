"""Commands to the running job: carried out at step boundaries, on all ranks, and repeated after a resume.

``CommandExecutor`` carries them out. Rank 0 accepts commands. That some are waiting is one flag of the reduction in
which the ranks synchronize their requests. Then rank 0 records the commands in ``control.jsonl``, and broadcasts them;
all ranks carry them out before the step's records, evaluations and save.

``CommandPlan`` is what the commands of earlier legs mean for the leg that begins. The leg's checkpoint contains the
effect of all commands up to its step, with two exceptions, which the script sets up anew: settings in
``TrainingArguments``, and callbacks that are switched off. These take effect again at the leg's begin. Commands of
later steps are carried out again at their steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dalsegno.args import TrainingArguments
from dalsegno.control.commands import LEARNING_RATE, SETTINGS, Command, is_repeated, parse_command, with_settings
from dalsegno.control.queue import CommandQueue
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.logs.journal import Journal, JournalEntry
from dalsegno.state import NO_REQUESTS, ControlRequests

from .checkpoint_contents import RecordedSettings
from .full_disk import expect_room
from .learning_rate import check_scalable, present_rate, scale_rates
from .run_parts import RunParts

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
        self._parts = parts
        self._args = parts.args
        self._state = parts.state
        self._dispatcher = parts.dispatcher
        self._settings = settings
        self._evaluates = evaluates
        self._journal = Journal(parts.args.directory)
        self.queue = CommandQueue(self._journal, parts.args, self._check, rank=collectives.rank())
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
        file is changed. If it ``goes_back``, the user has chosen this step: later commands are of an abandoned
        timeline. Collective."""
        rewind_to = step if goes_back else None
        script = self._script_values()
        plan = self._apply(step, rewind_to)

        def resume() -> None:
            with expect_room(self._journal.path, "nothing is trained"):
                self.queue.resume(rewind_to, plan.overridden)

        yield
        collectives.from_rank_zero(resume)
        if collectives.rank() == 0 and (text := describe_plan(plan, script)):
            is_surprising = plan.notes or "max_steps" in plan.settings
            logger.log(logging.WARNING if is_surprising else logging.INFO, "commands of earlier legs:\n  %s", text)

    def go_back(self, step: int) -> None:
        """Put in force what commands had set by ``step``, to which the leg goes back; later ones are repeated. Commands
        that wait for their effect still do. Collective."""
        self.undo_settings()
        self._apply(step, None)

    def _apply(self, step: int, rewind_to: int | None) -> CommandPlan:
        def planned() -> CommandPlan:
            return plan_commands(self.queue.read(rewind_to), step, self._args, self._script_values(), self._parsed)

        plan = self._plan = collectives.from_rank_zero(planned)
        self._change_settings(plan.settings)
        self._settings.plan_steps()
        self._switched_off = frozenset(plan.switched_off)
        self._dispatcher.switch_off(self._switched_off)
        return plan

    def undo_settings(self) -> None:
        """Restore what the script has set up."""
        vars(self._args).update(self._script)
        self._script.clear()
        self._dispatcher.switch_off(())

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
        acting: list[JournalEntry] = []
        refused: dict[str, str] = {}
        args = self._args
        for entry in self.queue.waiting():
            try:
                command = self._parsed(entry, args)
                rate, present = command.data.get(LEARNING_RATE), present_rate(self._parts.optimizer)
                if isinstance(rate, (int, float)) and (present == 0 or not 0 < rate / present < math.inf):
                    raise ConfigurationError(
                        f"{LEARNING_RATE}={rate:g}: after step {self._state.global_step} the schedule's value is "
                        f"{present:g}; a command scales the schedule by a factor, and none gives this rate"
                    )
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
        command = parse_command(entry.command, entry.data, args)
        self._check(command)
        return command

    def _check(self, command: Command) -> None:
        if (command.name == "evaluate" or command.data.get("evaluate")) and not self._evaluates:
            raise ConfigurationError(f"{command.name}: this run has no evaluation set")
        if "eval_steps" in command.data and not self._evaluates:
            raise ConfigurationError("set eval_steps: has no effect, since this run has no evaluation set")
        if command.name == "switch":
            self._dispatcher.check_observes(command.data["callback"])
        if LEARNING_RATE in command.data:
            check_scalable(self._parts.optimizer, self._parts.schedulers)

    def _carry_out(self, entry: JournalEntry, why: str) -> ControlRequests:
        name, data = entry.command, entry.data
        if collectives.rank() == 0:
            logger.info("at step %d, by %s: %s (%s)", self._state.global_step, entry.by, entry, why)
        if name == "set":
            self._set(data)
        elif name == "switch":
            key = {data["callback"]}
            self._switched_off = self._switched_off - key if data["on"] else self._switched_off | key
        elif name in ("graceful_stop", "save_and_stop", "abort"):
            self._parts.control.stop(f"command {name}", save=name != "abort", by=entry.by)
        wanted = _REQUESTS.get(name, NO_REQUESTS)
        return wanted._replace(evaluate=True) if data.get("evaluate") else wanted

    def _set(self, data: Mapping[str, Any]) -> None:
        self._change_settings({name: value for name, value in data.items() if name in SETTINGS})
        if "max_steps" in data:
            self._settings.plan_steps()
        if LEARNING_RATE in data:
            rate = data[LEARNING_RATE]
            factor = rate["factor"] if isinstance(rate, Mapping) else rate / present_rate(self._parts.optimizer)
            scale_rates(self._parts.optimizer, self._parts.schedulers, factor)

    def _change_settings(self, values: Mapping[str, Any]) -> None:
        self._script = {name: getattr(self._args, name) for name in values} | self._script
        vars(self._args).update(values)  # the user may not set them now

    def _script_values(self) -> dict[str, Any]:
        names = [*SETTINGS, LEARNING_RATE] if self._settings.sets_learning_rate else [*SETTINGS]
        return {name: self._script.get(name, getattr(self._args, name)) for name in names}


Parse = Callable[[JournalEntry, TrainingArguments], Command]
"""Checks an entry as if it were submitted now. Raises ConfigurationError."""


@dataclass(slots=True)
class CommandPlan:
    """Equal on all ranks."""

    settings: dict[str, Any] = field(default_factory=dict)
    """In force as the leg begins, other than the script's."""
    switched_off: set[str] = field(default_factory=set)
    """Keys of callbacks, as the leg begins."""
    repeated: dict[int, list[JournalEntry]] = field(default_factory=dict)
    """By the step at whose end they act."""
    overridden: dict[str, list[str]] = field(default_factory=dict)
    """Settings that no longer apply since the script has changed them, by the command's id."""
    notes: list[str] = field(default_factory=list)
    """Commands that cannot be carried out again, with the reason."""

    def supersede(self, newer: JournalEntry) -> dict[str, list[str]]:
        """Do not repeat later what ``newer``, which acts now, sets otherwise. Returns this by the commands' ids."""
        superseded: dict[str, list[str]] = {}
        for step, entries in self.repeated.items():
            for entry in entries:
                if both := _targets(entry) & _targets(newer):
                    superseded[entry.id] = sorted(both)
            self.repeated[step] = [kept for entry in entries if (kept := _without(entry, superseded.get(entry.id, ())))]
        return superseded


def plan_commands(
    entries: Iterable[JournalEntry], step: int, args: TrainingArguments, script: Mapping[str, Any], parse: Parse
) -> CommandPlan:
    """What ``entries``, in this order, mean for a leg that resumes from ``step``; ``args`` and ``script`` are as the
    script gives them, as far as they have an effect."""
    plan = CommandPlan()
    for acted in sorted(entries, key=lambda entry: entry.step or 0):
        if not is_repeated(acted):
            continue
        changed = [name for name, value in acted.script.items() if script.get(name, value) != value]
        if newly := sorted({*changed} & {*acted.data} - {*acted.overridden}):
            plan.overridden[acted.id] = newly
        entry = _without(acted, [*acted.overridden, *changed])
        is_later = (acted.step or 0) > step
        if entry is not None and not is_later:
            entry = _kept_in_force(entry)
        if entry is None:
            continue
        try:
            command = parse(entry, args)
            args = with_settings(args, command.data)
        except ConfigurationError as error:
            plan.notes.append(f"{_described(entry)} does not take effect again: {error}")
            continue
        if is_later:
            plan.repeated.setdefault(acted.step or 0, []).append(entry)
        elif entry.command == "set":
            plan.settings |= command.data
        elif command.data["on"]:
            plan.switched_off.discard(command.data["callback"])
        else:
            plan.switched_off.add(command.data["callback"])
    return plan


def describe_plan(plan: CommandPlan, script: Mapping[str, Any]) -> str:
    """The plan in words; empty if nothing is planned."""
    lines = [
        f"{name}={value} is in force, by a command (the script: {script[name]}); change the script's value to override"
        for name, value in plan.settings.items()
    ]
    lines += [f"{key} is switched off, by a command" for key in sorted(plan.switched_off)]
    for entries in plan.repeated.values():
        lines += [f"{_described(entry)} takes effect again" for entry in entries]
    for id_, names in plan.overridden.items():
        lines.append(f"{', '.join(names)}: the script's new value takes effect, not that of command {id_}")
    return "\n  ".join([*lines, *plan.notes])


def _targets(entry: JournalEntry) -> set[str]:
    """Names that the command sets: settings, or a callback's key."""
    return {entry.data["callback"]} if entry.command == "switch" else {*entry.data}


def _without(entry: JournalEntry, names: Iterable[str]) -> JournalEntry | None:
    """The command without these targets; None if nothing is left of it."""
    if entry.command == "switch":
        return None if entry.data.get("callback") in [*names] else entry
    if entry.command != "set":
        return entry
    data = {name: value for name, value in entry.data.items() if name not in [*names]}
    return replace(entry, data=data) if data else None


def _kept_in_force(entry: JournalEntry) -> JournalEntry | None:
    """The part of the command that no checkpoint stores; None if there is none."""
    if entry.command == "switch":
        return entry
    data = {name: value for name, value in entry.data.items() if name in SETTINGS}
    return replace(entry, data=data) if entry.command == "set" and data else None


def _described(entry: JournalEntry) -> str:
    return f"step {entry.step}: {entry}, by {entry.by},"
