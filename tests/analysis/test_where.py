"""Conditions on records, as they are typed."""

from __future__ import annotations

import math
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.analysis.where import parse_condition

RECORD: dict[str, Any] = {
    "global_step": 100,
    "timestamp": 5.0,
    "loss": 2.5,
    "kind": "eval",
    "bad": math.nan,
    "none": None,
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("loss > 2", True),
        ("loss>2.5", False),
        ("loss>=2.5", True),
        ("loss < 25e-1", False),
        ("loss <= 2.5", True),
        ("loss = 2.5", True),
        ("loss == 2.5 ", True),
        ("loss != 2.5", False),
        ("step == 100 and time == 5", True),
        ("loss > 3 or step < 500", True),
        ("loss > 3 and step < 500", False),
        ("loss > 3 or loss > 2 and step > 500", False),
        ("(loss > 3 or loss > 2) and not step > 500", True),
        ("not (loss > 2)", False),
        ("kind == eval", True),
        ('kind == "eval"', True),
        ("kind != train", True),
        ("kind > 3", False),
        ("loss == eval", False),
        ("loss != eval", True),
        ("nothing > 3", False),
        ("nothing != 3", True),
        ("none == 3", False),
        ("bad == nan", True),
        ("bad != nan", False),
        ("loss == nan", False),
        ("loss != nan", True),
        ("loss < inf", True),
        ("bad > 0", False),
    ],
)
def test_conditions(text: str, holds: bool) -> None:
    condition, _ = parse_condition(text)
    assert condition(RECORD) is holds


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("", 1, "a field name expected"),
        ("loss", 5, "<, <=, >, >=, == or != expected"),
        ("loss >", 7, "a number or a string expected"),
        ("loss > and", 8, "a number or a string expected"),
        ("(loss > 2", 10, "')' expected"),
        ("loss > 2 step < 3", 10, "'and' or 'or' expected"),
        ("loss > 2)", 9, "'and' or 'or' expected"),
        ('kind == "eval', 9, "unexpected character"),
    ],
)
def test_what_is_no_condition(text: str, place: int, message: str) -> None:
    with pytest.raises(ds.ConfigurationError) as error:
        parse_condition(text)
    assert f"at character {place}: {message}" in str(error.value)
