"""Columns: how ProgressCallback shows the values of a record."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dalsegno.errors import ConfigurationError

from .spec_merge import Spec, merge_specs

Format = str | Callable[[Any], str]
"""A format of a number such as ``".3f"``, a name in :data:`FORMATS`, a function, or ``""``: chosen by magnitude."""
Specs = Sequence[str] | Mapping[str, Format | Spec | None]
"""Names alone, in order; or specifications by name, merged over the default ones."""

WIDTH = 9
"""Minimum width of a column in characters; a longer label widens it."""


def _si(value: float) -> str:
    """``12.3K``, ``4.57M``: three digits, powers of 1000."""
    for power, symbol in enumerate(("", "K", "M", "B", "T")):
        if abs(value) < 999.5 * 1000**power or symbol == "T":
            return f"{value / 1000**power:.3g}{symbol}"
    raise AssertionError("the last symbol takes any value")


_OF_WHOLE_NUMBERS = "bcdoxX"
"""Last letters of formats that refuse a float."""

FORMATS: Mapping[str, Callable[[float], str]] = {"si": _si, "gib": lambda value: f"{value / 2**30:.3f} GiB"}


@dataclass(frozen=True, slots=True)
class Column:
    """How a value is shown."""

    label: str
    fmt: Format = ""
    width: int = WIDTH
    suffix: str = ""

    @property
    def full_width(self) -> int:
        """In characters, wide enough for the label."""
        return max(self.width, len(self.label))

    def text(self, value: Any) -> str:
        return f"{shown(value, self.fmt)}{self.suffix if value is not None else ''}"


def default_step_columns() -> dict[str, Spec]:
    """Return the columns of a training record that are shown by default, as far as they are logged."""
    return {
        "step": {"fmt": ".0f"},
        "epoch": {"fmt": ".2f"},
        "loss": {},
        "grad_norm": {},
        "learning_rate": {"fmt": ".2e"},
        "tok_per_sec": {"fmt": ",.0f"},
    }


def default_final_metrics() -> dict[str, Spec]:
    """Return the values of the final record that are shown by default."""
    return {
        "train_loss": {},
        "train_runtime": {"fmt": ",.1f"},
        "train_samples_per_second": {"fmt": ",.1f"},
        "train_steps_per_second": {"fmt": ",.1f"},
    }


def columns(argument: str, given: Specs | None, defaults: Mapping[str, Spec]) -> dict[str, Column]:
    """Return the columns that ``given`` asks for, by name: exactly the listed names, or the merged specifications.

    Raises:
        ConfigurationError: for anything but names, or specifications by name; the message names ``argument``.
    """
    if given is None:
        specs: Mapping[str, Spec] = defaults
    elif isinstance(given, Mapping):
        specs = merge_specs(defaults, {name: _spec(each) for name, each in given.items()})
    elif isinstance(given, Sequence) and not isinstance(given, str):
        known = default_step_columns() | default_final_metrics()
        specs = {name: known.get(name, {}) for name in given}
    else:
        raise ConfigurationError(f"{argument}={given!r}; needs a list of names, or a mapping of names to formats")
    return {name: _column(argument, name, spec) for name, spec in specs.items()}


def _spec(given: Any) -> Spec | None:
    if isinstance(given, Mapping):
        return dict(given)
    return None if given is None else {"fmt": given}


def _column(argument: str, name: str, spec: Spec) -> Column:
    try:
        column = Column(**{"label": name, **spec})
        if not callable(column.fmt):
            shown(1.0, column.fmt)
        sum([column.width, len(column.label), len(column.suffix)])
    except Exception as error:
        raise ConfigurationError(
            f"{argument}[{name!r}]={spec!r}; needs a format for a number, such as '.3f', or a mapping that may have "
            f"'fmt', 'label', 'width' and 'suffix', or None to remove it: {error}"
        ) from error
    return column


def shown(value: Any, fmt: Format = "") -> str:
    """Format a logged value: a number by ``fmt``, or by its magnitude if that is empty; "-" for None."""
    if value is None:
        return "-"
    if callable(fmt):
        return fmt(value)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return str(value)
    if fmt in FORMATS:
        return FORMATS[fmt](value)
    if fmt and fmt[-1] in _OF_WHOLE_NUMBERS:
        return format(int(value), fmt) if math.isfinite(value) else str(value)
    if fmt:
        return format(value, fmt)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if 1000 <= abs(value) < 1e9 else f"{value:#.4g}"
