"""Numbers of bytes as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.system.progress import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_700, "1 MB"),
        (1_500_000_000, "1.5 GB"),
        (12_345 * 10**15, "12345 PB"),
    ],
)
def test_three_digits_and_never_an_exponent(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(1, 999 * 10**12))
def test_what_is_written_can_be_read(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.005)
