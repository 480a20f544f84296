"""Numbers of bytes as text: written for people, and read from what they type."""

from __future__ import annotations

import re

_SYMBOLS = ("B", "kB", "MB", "GB", "TB", "PB")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def format_bytes(count: int) -> str:
    """``512 B``, ``4.1 kB``, ``1.5 GB``: three digits, powers of 1000."""
    if count < 1000:
        return f"{count} B"
    value, power = float(count), 0
    while value >= 999.5 and power < len(_SYMBOLS) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_SYMBOLS[power]}" if value < 999.5 else f"{value:.0f} {_SYMBOLS[power]}"


def parse_bytes(text: str) -> int:
    """Number of bytes in ``"5GB"``, ``"200 MB"``, ``"1GiB"`` or a plain number. Raises ValueError if ``text`` is none
    of these, or less than one byte."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2].upper() or "B") if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise ValueError(f"{text!r} is not a number of bytes; use a number or a text like '5GB' or '200MB'")
    return int(float(found[1]) * unit)
