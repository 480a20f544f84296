"""What a launch sends to its ranks: rebuilt equal, without pickle; what differs is carried, or refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno import callbacks
from dalsegno.config.signature import signature_of
from dalsegno.launcher.parcel import pack, same, write_private
from support.builtins import NAMES
from support.launched import Stop, half
from support.parcels import sent

VALUES: dict[str, Any] = {
    "numbers": [1, 2**70, -0.0, math.inf, True, None, "ä\ud800", b"\x00"],
    "containers": ({"a": (1, [2])}, {3, 4}, frozenset({5}), {1: "one", "$tensor": "no tag"}),
    "tensors": {"w": torch.arange(6.0).reshape(2, 3).t(), "b": torch.tensor(3, dtype=torch.bfloat16)},
    "names": [half, Path, ds.Every, print],
    "values of classes": [ds.Every(steps=3), ds.Event.SAVE, Path("a/b"), ds.Best(2, "eval_loss")],
    "a lookalike": ["value", ["name", "os:system"]],
}


@pytest.mark.parametrize("what", VALUES)
def test_values_arrive_as_they_were(what: str, tmp_path: Path) -> None:
    assert same(sent(VALUES[what], tmp_path), VALUES[what])


def test_a_partial_function_arrives(tmp_path: Path) -> None:
    assert sent(partial(half, 3.0), tmp_path)() == 1.5


NEEDS = {"TextgenCallback": {"prompts": ["Once upon"]}}
"""Arguments without which a callback with defaults for all is refused."""


def built_in(name: str) -> ds.Callback | None:
    """With its defaults, where it has some for all arguments."""
    kind = getattr(callbacks, name)
    if not (isinstance(kind, type) and issubclass(kind, ds.Callback)):
        return None
    if any(each.required for each in signature_of(kind).values()):
        return None
    return kind(**NEEDS.get(name, {}))


@pytest.mark.parametrize("name", [name for name in NAMES if built_in(name)])
def test_every_built_in_callback_arrives(name: str, tmp_path: Path) -> None:
    callback = built_in(name)
    arrived = sent(callback, tmp_path)
    assert type(arrived) is type(callback) and arrived.key == callback.key  # type: ignore[union-attr]


def test_one_inside_another_too(tmp_path: Path) -> None:
    arrived = sent(ds.Background(Stop(diverged=True), queue=3), tmp_path)
    assert isinstance(arrived, ds.Background) and arrived.__wrapped__.diverged  # type: ignore[attr-defined]


def test_state_is_sent_only_if_it_is_not_that_of_a_new_callback(tmp_path: Path) -> None:
    callback = callbacks.EarlyStopping(patience=2)
    assert pack(callback, "it")[1]["state"] is None
    used = {"best": 0.5, "best_step": 3, "bad": 1}
    callback.load_state_dict(callback.state_dict() | used)
    assert sent(callback, tmp_path).state_dict() == callback.state_dict()


def test_nothing_in_the_file_is_executable(tmp_path: Path) -> None:
    write_private(tmp_path / "parcel.json", pack([half, ds.Every(steps=3)], "it"))
    text = (tmp_path / "parcel.json").read_text()
    assert json.loads(text)[1][0] == ["name", "support.launched:half"]
    assert "def half" not in text and "return" not in text


class Odd(ds.Callback):
    """Its constructor does not take what it keeps."""

    def __init__(self, size: int = 1) -> None:
        self.values = list(range(size))
        self.file: Any = None


def with_file(path: Path) -> Odd:
    odd = Odd()
    odd.file = path.open("w")
    return odd


CHANGED: dict[str, Callable[[Odd], None]] = {
    "replaced": lambda odd: setattr(odd, "values", [7]),
    "mutated": lambda odd: odd.values.append(7),
    "added": lambda odd: setattr(odd, "extra", {"a": torch.ones(2)}),
}


@pytest.mark.parametrize("how", CHANGED)
def test_attributes_that_were_set_since_arrive(how: str, tmp_path: Path) -> None:
    odd = Odd(3)
    CHANGED[how](odd)
    arrived = sent(odd, tmp_path)
    odd.construction = arrived.construction
    assert same(vars(arrived), vars(odd))


def test_an_open_file_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match=r"it\.file: a TextIOWrapper .* cannot be sent to other processes"):
        pack(with_file(tmp_path / "file"), "it")
