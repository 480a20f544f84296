"""A value of the wrong type is refused, for every setting, by an error that names the setting and what it takes."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dalsegno as ds
from dalsegno.callbacks import EMA

TAKES = {
    "bool": "needs True or False",
    "bool | None": "needs True or False or None",
    "Limit": "needs an integer of at least -1",
    "Count": "needs an integer of at least 0",
    "Positive": "needs an integer of at least 1",
    "int": "needs an integer",
    "int | None": "needs an integer or None",
    "Decay": "needs a number from 0 to below 1",
    "NotNegative": "needs a number of at least 0",
    "Share": "needs a number of at least 0",
    "float | None": "needs a number or None",
    "str": "needs a string",
    "str | None": "needs a string or None",
    "str | Path": "needs a string or a path",
    "str | Path | None": "needs a string or a path or None",
    "dict[str, Any] | None": "needs a dict of arguments, or None",
    "Strategy": "allowed are 'no', 'steps', 'epoch'",
}
"""By a setting's annotation, what the error states."""
TAKES_BY_NAME = {
    "lr_scheduler_type": "allowed are 'linear', 'cosine'",
    "gradient_accumulation_schedule": "needs integers of at least 1 by the step",
    "sequence_length_schedule": "needs integers of at least 1 by the step",
    "parallel": "allowed are 'auto', 'none', 'ddp', 'fsdp', FSDP(…)",
    "save": "is not a save trigger; use Every(…)",
    "save_in_memory": "is not a save trigger; use Every(…)",
    "save_pretrained": "is not a save trigger; use Every(…)",
    "keep": "is not a retention rule; use Latest(…)",
    "report_to": "needs a name, several, or 'none'",
    "recovery": "is not a recovery policy; use RecoveryPolicy(…)",
}
SETTINGS = {field.name: str(field.type) for field in fields(ds.TrainingArguments)}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting(name: str, tmp_path: Path) -> None:
    takes = TAKES_BY_NAME.get(name) or TAKES.get(SETTINGS[name], "allowed are ")
    for wrong in (object(), 1j, {1}):
        given: dict[str, Any] = {"output_dir": tmp_path, name: wrong}
        with pytest.raises(ds.ConfigurationError) as raised:
            ds.TrainingArguments(**given)
        assert str(raised.value).startswith(f"{name}=")
        assert takes in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("optim", 1, "optim=1; needs a string"),
        ("bf16", "false", "bf16='false'; needs True or False"),
        ("requeue", 1, "requeue=1; needs True or False"),
        ("seed", True, "seed=True; needs an integer"),
        ("seed", 1.5, "seed=1.5; needs an integer"),
        ("max_steps", "10", "max_steps='10'; needs an integer of at least -1"),
        ("learning_rate", "3e-4", "learning_rate='3e-4'; needs a number of at least 0"),
        ("adam_beta1", 1, "adam_beta1=1; needs a number from 0 to below 1"),
        ("adam_epsilon", float("nan"), "adam_epsilon=nan; needs a number of at least 0"),
        ("output_dir", None, "output_dir=None; needs a string or a path"),
        ("metric_for_best_model", ["loss"], "metric_for_best_model=['loss']; needs a string or None"),
        ("save", "often", "save='often': 'often' is not a rule; write for example Every(…)"),
        ("save", "OnBest() | often", "save='OnBest() | often': 'often' is not a rule"),
    ],
)
def test_what_looks_right(name: str, value: Any, message: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"output_dir": tmp_path, name: value}
    with pytest.raises(ds.ConfigurationError) as raised:
        ds.TrainingArguments(**given)
    assert str(raised.value).startswith(message)


def test_a_subclass_may_have_settings_of_any_type(tmp_path: Path) -> None:
    class Mine(ds.TrainingArguments):
        extra: "NotImported"  # type: ignore[name-defined]  # noqa: F821, UP037

    assert Mine(tmp_path, seed=7).seed == 7


def test_numbers_of_numpy(tmp_path: Path) -> None:
    """As a sweep passes them. Settings are Python's numbers, which JSON takes."""
    given: dict[str, Any] = {"seed": np.int64(3), "learning_rate": np.float32(0.5), "weight_decay": np.float64(0.25)}
    args = ds.TrainingArguments(tmp_path, **given)
    assert [args.seed, args.learning_rate, args.weight_decay] == [3, 0.5, 0.25]
    assert [*map(type, (args.seed, args.learning_rate, args.weight_decay))] == [int, float, float]


def test_signatures_and_sentences_are_there_for_notebooks() -> None:
    for kind in (ds.Trainer, ds.TrainingArguments):
        names = [*inspect.signature(kind.__init__).parameters][1:]
        assert [*inspect.signature(kind).parameters] == names and len(names) > 10
    assert [*inspect.signature(ds.TrainingArguments).parameters] == [*SETTINGS]

    class Own(ds.Callback):
        pass

    class Mine(ds.Trainer):
        def __init__(self, path: str) -> None: ...

    assert [[*inspect.signature(kind).parameters] for kind in (Own, Mine, EMA)][:2] == [[], ["path"]]
    assert "decay" in inspect.signature(EMA).parameters
    text = inspect.getdoc(ds.TrainingArguments) or ""
    assert text.startswith("The settings of one run.") and "Raises:" in text
    assert [name for name in SETTINGS if f"    {name}: " not in text] == []
    for event in ds.Event:
        assert event.fires in (inspect.getdoc(getattr(Own, event.handler)) or "")
    assert "grad_norm" in (inspect.getdoc(ds.Callback.on_step_end) or "")
