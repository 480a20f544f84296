"""The closed table of commands: what is accepted, and with which reason all else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.control import COMMANDS, parse_command


def arguments(tmp_path: Path, **settings: Any) -> ds.TrainingArguments:
    return ds.TrainingArguments(tmp_path, **settings)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("graceful_stop", {}),
        ("set", {"learning_rate": 3e-4}),
        ("set", {"learning_rate": {"factor": 2}}),
        ("set", {"save_steps": 0, "eval_steps": 5, "logging_steps": 1, "max_steps": 7}),
        ("switch", {"callback": "JsonLogger", "on": False}),
    ],
)
def test_accepted(tmp_path: Path, name: str, data: dict[str, Any]) -> None:
    command = parse_command(name, data, arguments(tmp_path))
    assert (command.name, command.data) == (name, data)
    assert command.data is not data


@pytest.mark.parametrize(
    ("name", "data", "settings", "reason"),
    [
        ("gracefulstop", {}, {}, "did you mean 'graceful_stop'"),
        ("__class__", {}, {}, "unknown command"),
        ("abort", {"force": True}, {}, "unknown field of abort 'force'"),
        ("set", {}, {}, "names no setting"),
        ("set", {"lr": 0.1}, {}, "did you mean 'learning_rate'"),
        ("set", {"output_dir": "/"}, {}, "unknown field of set"),
        ("set", {"learning_rate": 0}, {}, "a number over 0"),
        ("set", {"learning_rate": float("nan")}, {}, "a finite number"),
        ("set", {"learning_rate": float("inf")}, {}, "a finite number"),
        ("set", {"learning_rate": 10**400}, {}, "a finite number"),
        ("set", {"max_steps": 2**60}, {}, "a finite number"),
        ("set", {"max_steps": [1]}, {}, "a single value, not a list"),
        ("set", {"save_steps": {"factor": 2}}, {}, "needs an integer"),
        ("switch", {"callback": "x" * 201, "on": True}, {}, "at most 200"),
        ("set", {"learning_rate": True}, {}, "a number over 0"),
        ("set", {"learning_rate": {"times": 2}}, {}, "a single value, not a dict"),
        ("set", {"learning_rate": {"factor": -1}}, {}, "a number over 0"),
        ("set", {"save_steps": -1}, {}, "save_steps=-1; needs an integer of at least 0"),
        ("set", {"save_steps": 2.5}, {}, "needs an integer"),
        ("set", {"save_steps": 10, "eval_steps": "10"}, {}, "eval_steps='10'; needs an integer"),
        ("set", {"max_steps": 0}, {}, "max_steps=0; needs an integer of at least 1"),
        ("set", {"max_steps": -1}, {}, "max_steps=-1"),
        ("set", {"eval_steps": 5}, {"eval_strategy": "epoch"}, "has no effect, since eval_strategy='epoch'"),
        ("set", {"save_steps": 500}, {"save": "Every(steps=3)"}, "has no effect, since save="),
        ("set", {"save_steps": 0}, {"load_best_model_at_end": True}, "load_best_model_at_end=True needs"),
        ("switch", {"callback": "JsonLogger"}, {}, "switch: needs"),
        ("switch", {"callback": 3, "on": True}, {}, "switch: needs"),
        ("log", [1], {}, "its data is a list"),
    ],
)
def test_refused(tmp_path: Path, name: str, data: Any, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=reason.replace("(", r"\(").replace("{", r"\{")):
        parse_command(name, data, arguments(tmp_path, **settings))


def test_what_concerns_only_a_leg_is_not_repeated() -> None:
    assert {name for name, kind in COMMANDS.items() if kind.is_repeated} == {"evaluate", "log", "set", "switch"}
