"""The colours of every picture: told apart by all kinds of colour vision, on white and on dark grey."""

from __future__ import annotations

RUNS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
"""One a run, in this order and then again: the colours that Okabe and Ito chose (2008), but for black and yellow, which
drown in a background; a brown and a grey, which differ from the others in lightness, stand in for them."""

LOST = "#E69F00"
"""What a killed leg had done in vain."""


def colour(index: int) -> str:
    """Of the run with this number, from 0."""
    return RUNS[index % len(RUNS)]
