"""Ticks: round numbers along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

LEAST = 1e-300
"""Least distance of ticks; below it floats are too sparse."""


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between finite ``low`` and ``high``, about ``most`` of them."""
    rough = (high - low) / most
    if not rough > LEAST:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for factor in (1, 2, 5, 10) if (step := factor * power) >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)][: most + 1]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten between positive ``low`` and ``high``; with multiples of them if these are few, and those of
    :func:`nice_ticks` in a narrow range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1,)):
        found = [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]
        if len(found) < 2:
            return nice_ticks(low, high, most)
        if len(found) <= most:
            return found
    return found[:: -(-len(found) // most)]


def labelled(ticks: Sequence[float]) -> list[tuple[float, str]]:
    """Each of evenly spaced ticks with its label."""
    apart = ticks[1] - ticks[0] if len(ticks) > 1 else 0.0
    return [(tick, tick_label(tick, apart)) for tick in ticks]


def tick_label(value: float, step: float) -> str:
    """Label with the digits that distinguish neighbouring ticks: ``0.25``, ``1,500``, ``2e+09``."""
    if (value or step < 1e-15) and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3g}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{digits}f}"
