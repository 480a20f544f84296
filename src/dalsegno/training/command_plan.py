"""CommandPlan: what commands of earlier legs mean for the leg that begins.

A command acted at the end of a step, before that step's save. So the leg's checkpoint contains the effect of all
commands up to its own step, except on the settings in ``TrainingArguments`` and on callbacks that are switched off,
which the script sets up anew: these are put in force again. Later commands are carried out again at their steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dalsegno.args import TrainingArguments
from dalsegno.control.commands import SETTINGS, Command, with_settings
from dalsegno.control.journal import JournalEntry
from dalsegno.errors import ConfigurationError

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
    """
    Args:
        entries: commands that have taken effect, in this order.
        step: of the checkpoint that the leg resumes from.
        args: as the script gives them.
        script: the script's values of all settings that commands may change, as far as they have an effect.
        parse: checks an entry.
    """
    plan = CommandPlan()
    for acted in sorted(entries, key=lambda entry: entry.step or 0):
        if not acted.is_repeated:
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
    return f"step {entry.step}: {Command(entry.command, entry.data)}, by {entry.by},"
