"""Whatever is given for an argument: it works, or it is an error at once that says which argument it was."""

from __future__ import annotations

import inspect
import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno import callbacks

NEEDED: dict[str, dict[str, Any]] = {
    "LogOptimizerParamGroup": {"keys": ["lr"]},
    "ModelEvalMetrics": {"metrics": {}, "select": lambda outputs, batch: ()},
    "Notify": {"urls": "json://localhost"},
    "ScaleLoss": {"value": 1.0},
    "ScopedFlags": {"flags": {}},
    "SkipSamples": {"n": 0},
    "OptunaPruning": {"trial": None},
    "TextgenCallback": {"prompts": ["a"]},
}
"""What some cannot be built without."""

ANYTHING: list[Any] = [
    *(None, True, -1, 0, 1, 1.5, math.nan, math.inf, 2 + 1j, torch.tensor(1), object()),
    *("x", "", b"x", [], ["x"], [1], ("a", 1), {}, {"x": 1}, {1: "x"}),
]

ARGUMENTS = [
    pytest.param(name, argument, id=f"{name}-{argument}")
    for name in callbacks.__all__
    if not (hasattr(getattr(callbacks, name), "package") and find_spec(getattr(callbacks, name).package) is None)
    for argument, about in inspect.signature(getattr(callbacks, name)).parameters.items()
    if about.kind not in (about.VAR_POSITIONAL, about.VAR_KEYWORD)
    and argument != "name"  # that is looked at when the trainer is built
]


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_it_works_or_is_named(name: str, argument: str) -> None:
    for value in ANYTHING:
        try:
            getattr(callbacks, name)(**{**NEEDED.get(name, {}), argument: value})
        except ds.DalsegnoError as error:
            assert argument.removesuffix("s") in str(error), (value, str(error))


def test_every_argument_is_tried() -> None:
    assert len(ARGUMENTS) > 50
