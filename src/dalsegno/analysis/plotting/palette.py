"""Colours of all plots: distinct for every kind of colour vision, on white and on dark grey."""

from __future__ import annotations

RUNS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
"""Colours of the runs, in this order and then repeated: the palette of Okabe and Ito (2008), but for black and yellow,
which have too little contrast with a background; replaced by a brown and a grey of other lightness."""

LOST = "#E69F00"
"""Records that were cut off the log."""


def colour(index: int) -> str:
    """Colour of a run, by its index."""
    return RUNS[index % len(RUNS)]
