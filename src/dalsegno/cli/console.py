"""Progress of training processes on a terminal: one line for each leg; the leg's own output goes to a file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

BAR = 30
"""Width of the progress bar of the whole run, in characters."""

REDRAW = 0.1
"""Least time between two updates of a live line, in seconds."""

LINES = 5
"""Progress lines for the whole run where a line cannot be redrawn (a file, a pipe)."""


def redirect_output(path: Path) -> None:
    """Append all output of this process, that of C libraries included, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


class LegLine:
    """Progress of one leg: a line redrawn in place on a terminal, a few lines elsewhere.

    The bar is the whole run: dotted for the steps of earlier legs, solid for those of this one.
    """

    def __init__(self, name: str, total: int, stream: TextIO | None = None) -> None:
        self._indent = " " * (len(name) + 2)
        self._total = total
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._began = self._drawn = time.monotonic()
        self._first: int | None = None
        self._step = 0
        self._loss: float | None = None
        self._write(f"{name}  ")

    def advance(self, step: int, loss: float | None) -> None:
        """``step``: finished steps of the run; ``loss``: the last one logged."""
        if self._first is None:
            self._first = self._step = step
            self._write(f"resumes from the checkpoint of step {step}\n" if step else "starts from scratch\n")
        crossed = step * LINES // self._total > self._step * LINES // self._total
        self._step, self._loss = step, loss
        if self._live and time.monotonic() - self._drawn >= REDRAW:
            self._draw()
        elif not self._live and crossed:
            self._write(f"{self._indent}{self._progress()}\n")

    def end(self, outcome: Sequence[str]) -> None:
        """Keep the last state of the line and print the outcome below it, one item per line."""
        if self._live:
            self._draw()
            self._write("\n")
        self._write("".join(f"{self._indent}{line}\n" for line in outcome))

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._write(f"\r\x1b[K{self._indent}{self._bar()}  {self._progress()}")

    def _progress(self) -> str:
        loss = "" if self._loss is None else f"  loss {self._loss:.3f}"
        seconds = time.monotonic() - self._began
        return f"step {self._step:>{len(str(self._total))}}/{self._total}{loss}  {seconds:3.0f} s"

    def _bar(self) -> str:
        first, step = (BAR * each // self._total for each in (self._first or 0, self._step))
        return "·" * first + "━" * (step - first) + " " * (BAR - step)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
