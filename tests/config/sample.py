"""Callbacks and a factory for configurations to name, as a user's own module would hold them."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

import dalsegno as ds
from dalsegno.testing import TinyRegression, tiny_regression_data

if TYPE_CHECKING:
    from collections.abc import Buffer  # as hints for type checkers may be

built: list[str] = []
"""The classes of which something was built, in order."""


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Window:
    begin: int
    end: int | None = None


class Beat(ds.Callback):
    """Takes one of everything.

    Longer words.

    Args:
        every: steps from one beat to the next,
            at least one.
        mode: loud, or not.
    """

    def __init__(
        self,
        every: int = 10,
        mode: Literal["loud", "soft"] = "soft",
        *,
        weight: float = 1.0,
        limit: float | None = None,
        path: Path | None = None,
        names: Sequence[str] = (),
        pair: tuple[int, str] = (0, ""),
        shown: Sequence[str] | Mapping[str, str] | None = None,
        due: ds.Every | None = None,
        windows: list[Window] | None = None,
        colour: Colour = Colour.RED,
        hidden: Buffer | None = None,
        loose=None,
    ) -> None:
        built.append("Beat")
        self.given = {key: value for key, value in locals().items() if key not in ("self", "__class__")}

    def on_step_end(self, ctx: Any) -> None: ...


class Picky(ds.Callback):
    def __init__(self, size: int) -> None:
        built.append("Picky")
        if size > 9:
            raise ds.ConfigurationError(f"size={size}; allowed are 0 to 9")
        if size < 0:
            raise RuntimeError("below zero")


class Other(ds.Callback):
    """Without a constructor of its own."""


class StopAfterFirst(ds.Callback):
    def on_step_end(self, ctx: Any) -> None:
        ctx.control.stop("enough")


def make_other() -> ds.Callback:
    return Other()


def make_nothing() -> None: ...


def build(args: ds.TrainingArguments, callbacks: list[ds.Callback], length: int = 20) -> ds.Trainer:
    torch.manual_seed(0)
    return ds.Trainer(TinyRegression(), args, train_dataset=tiny_regression_data(length), callbacks=callbacks)


def build_without_them(args: ds.TrainingArguments, callbacks: list[ds.Callback]) -> ds.Trainer:
    return build(args, [])


def build_nothing(args: ds.TrainingArguments, callbacks: list[ds.Callback]) -> None: ...


def build_alone() -> None: ...
