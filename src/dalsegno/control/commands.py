"""Commands: the closed table of what a running job can be asked to do, and the check of each command's data."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dalsegno.args import TrainingArguments, answers
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.logs.journal import JournalEntry, in_words, value_in_words


@dataclass(frozen=True, slots=True)
class Command:
    """A command whose name and data have been checked."""

    name: str
    data: Mapping[str, Any]
    """JSON values."""

    def __str__(self) -> str:
        return in_words(self.name, self.data)


@dataclass(frozen=True, slots=True)
class CommandKind:
    """A row of the table."""

    description: str
    fields: Mapping[str, str]
    """Fields of the data, each with the values that it may have."""
    is_repeated: bool
    """Whether a leg that resumes from before the command's step carries it out again there."""


_LARGEST = 2**53  # up to here a float is exact, and an int fits wherever one is saved
_LONGEST_TEXT = 200

LEARNING_RATE = "learning_rate"
SETTINGS: Mapping[str, str] = {
    "logging_steps": "logging_strategy",
    "eval_steps": "eval_strategy",
    "save_steps": "save_strategy",
    "max_steps": "",
}
"""Settings in ``TrainingArguments`` that ``set`` changes, each with the one that must be ``steps`` for it to apply."""

COMMANDS: Mapping[str, CommandKind] = {
    "graceful_stop": CommandKind("save a checkpoint and end; the next start resumes", {}, False),
    "save_checkpoint": CommandKind("save a checkpoint", {"evaluate": "true: evaluate on every set before"}, False),
    "save_and_stop": CommandKind("the same as graceful_stop", {}, False),
    "abort": CommandKind("end without a checkpoint; the next start resumes from the newest one", {}, False),
    "evaluate": CommandKind("evaluate on every evaluation set", {}, True),
    "log": CommandKind("log a training record", {}, True),
    "set": CommandKind(
        "change settings from this step on",
        {
            LEARNING_RATE: 'the first parameter group\'s rate from the next step on, or {"factor": f}; all groups and '
            "the rest of the schedule are scaled by the same factor",
            "logging_steps": "steps between records; 0: never",
            "eval_steps": "steps between evaluations; 0: never",
            "save_steps": "steps between checkpoints; 0: never",
            "max_steps": "optimizer steps over all legs; at or below the present step: the run ends as finished",
        },
        True,
    ),
    "switch": CommandKind(
        "switch a callback that only observes off and on", {"callback": "its key", "on": "true or false"}, True
    ),
}


def is_repeated(entry: JournalEntry) -> bool:
    """Whether a leg that resumes from before the command's step carries it out again there."""
    return entry.command in COMMANDS and COMMANDS[entry.command].is_repeated


def parse_command(name: str, data: Mapping[str, Any], args: TrainingArguments) -> Command:
    """Check a command. ``data``: JSON values by field; ``args``: the settings in force, which the command may change.

    Raises:
        UnknownName: for an unknown command or field; the message suggests the nearest.
        ConfigurationError: for a value that cannot work, or a setting that has no effect in this run.
    """
    if not isinstance(name, str) or name not in COMMANDS:
        raise UnknownName("command", str(name)[:80], COMMANDS)
    if not isinstance(data, Mapping):
        raise ConfigurationError(f"{name}: its data is a {type(data).__name__}; must be an object with named fields")
    fields = COMMANDS[name].fields
    for field, value in data.items():
        if field not in fields:
            raise UnknownName(f"field of {name}", str(field)[:80], fields, answers(fields, "Trainer"))
        _check_plain(field, value)
    if name == "set":
        _check_set(data, args)
    elif name == "switch" and not (isinstance(data.get("callback"), str) and isinstance(data.get("on"), bool)):
        raise ConfigurationError(
            'switch: needs {"callback": key, "on": true or false}, with the key of a callback, such as "JsonLogger"'
        )
    elif not isinstance(data.get("evaluate", False), bool):
        raise ConfigurationError(f"{name}: evaluate={value_in_words(data['evaluate'])}; needs true or false")
    return Command(name, copy.deepcopy(dict(data)))


def with_settings(args: TrainingArguments, data: Mapping[str, Any]) -> TrainingArguments:
    """Return a copy of ``args`` with the settings in ``data``, which checks itself; the learning rate is not among
    them. Raises ConfigurationError for a value that cannot work, or a setting that has no effect beside the others.
    """
    for name in data.keys() & SETTINGS.keys():
        strategy = SETTINGS[name]
        if strategy and getattr(args, strategy) != "steps":
            raise ConfigurationError(f"set {name}: has no effect, since {strategy}={getattr(args, strategy)!r}")
    if "save_steps" in data and args.save is not None:
        raise ConfigurationError(f"set save_steps: has no effect, since save={str(args.save)!r} decides when to save")
    steps = data.get("max_steps", 1)
    if type(steps) is not int or steps < 1:  # -1 would mean epochs, whose length may be unknown
        raise ConfigurationError(f"max_steps={steps!r}; needs an integer of at least 1")
    return dataclasses.replace(args, **{name: value for name, value in data.items() if name in SETTINGS})


def _check_plain(field: str, value: Any) -> None:
    """Raises ConfigurationError for anything but a number, a truth value, a text, or one of these as a factor."""
    if isinstance(value, Mapping) and [*value] == ["factor"]:
        value = value["factor"]
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        raise ConfigurationError(f"{field}: a text of {len(value)} characters; at most {_LONGEST_TEXT}")
    if isinstance(value, int | float) and not -_LARGEST <= value <= _LARGEST:  # which NaN is not, either
        raise ConfigurationError(f"{field}: needs a finite number, of at most {_LARGEST:g}")
    if not isinstance(value, str | int | float | None):
        raise ConfigurationError(f"{field}: needs a single value, not a {type(value).__name__}")


def _check_set(data: Mapping[str, Any], args: TrainingArguments) -> None:
    if not data:
        raise ConfigurationError(f"set: names no setting; known are {', '.join(COMMANDS['set'].fields)}")
    if LEARNING_RATE in data:
        value = data[LEARNING_RATE]
        number = value["factor"] if isinstance(value, Mapping) else value
        if type(number) not in (int, float) or number <= 0:
            raise ConfigurationError(f"{LEARNING_RATE}={value_in_words(value)}; needs a number over 0")
    with_settings(args, data)
