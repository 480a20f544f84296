"""Round numbers along an axis."""

from __future__ import annotations

import math

LEAST = 1e-300
"""Between ticks that are nearer, there are too few numbers to choose from."""


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """At most ``most`` multiples of 1, 2 or 5 times a power of ten, from ``low`` to ``high``, both finite."""
    rough = (high - low) / most
    if not rough > LEAST:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for factor in (1, 2, 5, 10) if (step := factor * power) >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)][: most + 1]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten from ``low`` to ``high``, both over 0; with 2 and 5 times these, where there are few, and as
    :func:`nice_ticks` has them within a narrow range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1,)):
        found = [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]
        if len(found) < 2:
            return nice_ticks(low, high, most)
        if len(found) <= most:
            return found
    return found[:: -(-len(found) // most)]


def tick_label(value: float, step: float) -> str:
    """With the digits that tell it from its neighbour: ``0.25``, ``1,500``, ``2e+09``."""
    if (value or step < 1e-15) and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3g}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{digits}f}"
