"""A value is held against the form that a type says; what does not fit is named with its path."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.distributed.rng import GeneratorStates, capture_generators
from dalsegno.errors import DamagedCheckpoint, StateMismatch
from dalsegno.stateful.schema import Count, Must, check


class Inner(TypedDict):
    name: str
    numbers: list[int]


class Outer(TypedDict):
    kind: Literal["a", "b"]
    at: Inner
    places: dict[str, tuple[int, float]]
    maybe: NotRequired[Count | None]


@dataclass
class Leg:
    first: int
    reason: str | None = None


@dataclass
class Run:
    legs: list[Leg]
    newest: Leg | None
    by_name: dict[str, Leg]


def complaint(value: Any, form: Any) -> str | None:
    """What check() raises about the value; None if it fits."""
    try:
        check(value, form, "here")
    except StateMismatch as error:
        return str(error)
    return None


GOOD: Outer = {"kind": "a", "at": {"name": "x", "numbers": [1, 2]}, "places": {"p q": (1, 2)}}


def test_dataclasses_are_made_of_their_fields() -> None:
    run = Run([Leg(1), Leg(2, "died")], Leg(2), {"first": Leg(1)})
    assert check(asdict(run), Run, "here") == run
    assert check([asdict(run), None], list[Run | None], "here") == [run, None]


@pytest.mark.parametrize(
    ("form", "value"),
    [
        (Outer, GOOD),
        (Outer, {**GOOD, "maybe": None}),
        (Leg, {"first": 1}),
        (Leg, {"first": 1, "reason": "died"}),
        (float, 3),
        (float, 10**300),
        (float, float("nan")),
        (float, np.float32(1)),
        (int, 2**64 - 1),
        (int | None, None),
        (tuple[int, ...], (1, 2, 3)),
        (np.ndarray[Any, Any], np.zeros(2)),
        (Any, object()),
    ],
)
def test_what_fits(form: Any, value: Any) -> None:
    assert complaint(value, form) is None


@pytest.mark.parametrize(
    ("form", "value", "message"),
    [
        (Outer, [], "here: is a list of 0; must be a dict with the keys kind, at, places, maybe"),
        (Outer, {**GOOD, "kind": "c"}, "here.kind: is 'c'; must be 'a' or 'b'"),
        (Outer, {**GOOD, "more": 1}, "here: has the unknown key 'more'; its keys must be kind, at, places, maybe"),
        (Outer, {"kind": "a", "at": GOOD["at"]}, "here: has no 'places'; its keys must be kind, at, places, maybe"),
        (Outer, {**GOOD, "at": {"name": "x", "numbers": [1, True]}}, "here.at.numbers[1]: is True; must be a 64-bit"),
        (Outer, {**GOOD, "places": {"p q": (1, "2")}}, "here.places['p q'][1]: is '2'; must be a number"),
        (Outer, {**GOOD, "maybe": -1}, "here.maybe: is -1; must be 0 or more or None"),
        (Leg, {}, "here: has no 'first'; its keys must be first, reason"),
        (int, 2**64, "must be a 64-bit integer"),
        (int, 1 << 40_000, "here: is a number of 40001 bits; must be a 64-bit integer"),
        (float, 10**400, "must be a number"),
        (int, "x" * 1000, "x…; must be a 64-bit integer"),
        (bool, 1, "here: is 1; must be true or false"),
        (int | bytes, 2.5, "here: is 2.5; must be a 64-bit integer or bytes"),
        (Inner | None, {"name": "x", "numbers": [None]}, "here.numbers[0]: is None"),
        (torch.Tensor, torch.zeros(2).numpy(), "here: is a ndarray of float32 [2]; must be a Tensor"),
        (Annotated[int, Must("odd", lambda n: 1 / (n % 2))], 2, "here: is 2; must be odd"),
    ],
    ids=itertools.count(),
)
def test_what_does_not_fit(form: Any, value: Any, message: str) -> None:
    with pytest.raises(DamagedCheckpoint) as raised:
        check(value, form, "here", DamagedCheckpoint)
    assert str(raised.value).startswith("here") and message in str(raised.value)


@given(st.integers(0, 3000), st.integers(0, 2**32 - 1))
def test_every_state_of_the_generators_fits(draws: int, seed: int) -> None:
    before = capture_generators()
    try:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        torch.rand(draws)
        [random.gauss(0, 1) for _ in range(draws)]
        np.random.standard_normal(draws)
        assert complaint(capture_generators(), GeneratorStates) is None
    finally:
        random.setstate(before["python"])
        np.random.set_state(before["numpy"])
        torch.set_rng_state(before["torch"])


def test_a_place_outside_of_a_generators_buffer() -> None:
    """Each of them would be read from there: NumPy ends in SIGSEGV, torch goes on with somebody else's memory."""
    saved = capture_generators()
    wrong = saved["torch"].clone()
    wrong[8] = (int(wrong[8]) + 1) % 256
    name, key, *_ = saved["numpy"]
    philox = np.random.Philox(0).state | {"buffer_pos": -(2**31)}
    for part, state in [
        ("numpy", (name, key, -(2**31), 0, 0.0)),
        ("numpy", (name, key, 2**31, 0, 0.0)),
        ("numpy", (name, key[:9], 624, 0, 0.0)),
        ("numpy", philox),
        ("numpy", {"bit_generator": "os"}),
        ("torch", wrong),
        ("torch", wrong[:-1]),
        ("python", (3, (*saved["python"][1][:-1], 2**40), None)),
    ]:
        with pytest.raises(StateMismatch, match=rf"rng\.{part}"):
            check({**saved, part: state}, GeneratorStates, "rng")
