"""Output of the commands: tables for people, JSON for programs, and the progress of training processes.

On a terminal a table fits its width; into a file or a pipe nothing is shortened. Only terminals get colours, unless the
environment variable NO_COLOR is set and not empty (https://no-color.org).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

from dalsegno.logs.values import is_number, to_json
from dalsegno.system.progress import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

NOTHING = "–"
"""Shown for a missing value."""

FOLDED = 12
"""Least width of a text column on a narrow terminal, in characters."""


def shows_colours(file: TextIO) -> bool:
    """Whether ``file`` is a terminal whose user has not set NO_COLOR; rich checks both by itself."""
    return file.isatty() and not os.environ.get("NO_COLOR")


def number(value: float | int | None) -> str:
    """Integers in full, floats to five significant digits."""
    if value is None:
        return NOTHING
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def text(value: object) -> str:
    return NOTHING if value is None else str(value)


def visible(text: str) -> str:
    """``text`` with control characters escaped, so that the content of a log cannot control the terminal."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def visible_lines(text: str) -> str:
    """As :func:`visible`, but with its line breaks."""
    return "\n".join(map(visible, text.split("\n")))


def complain(text: object) -> None:
    """Say on standard error what is wrong. It may quote a file of strangers."""
    with contextlib.suppress(BrokenPipeError):
        print(f"dalsegno: {visible_lines(str(text))}", file=sys.stderr)


def moment(seconds: float | None) -> str:
    """UTC seconds in local time."""
    return NOTHING if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def span(seconds: float | None) -> str:
    """``12 s``, ``3 min 20 s``, ``5 h 07 min``, ``3 d 04 h``."""
    if seconds is None:
        return NOTHING
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"


def size(count: int | None) -> str:
    """Bytes: ``512 B``, ``4.1 kB``, ``2.5 GB``."""
    return NOTHING if count is None else format_bytes(count)


def fitted(words: str, width: int | None) -> str:
    """``words``, items separated by two spaces, cut after the last item that fits ``width``, so that no number is cut.

    None: not cut.
    """
    if width is None or len(words) <= width:
        return words
    kept = words[: width - 1].rpartition("  ")[0] if words[width - 2 : width] != "  " else words[: width - 2]
    return f"{kept} …" if kept.strip() else f"{words[: width - 1]}…"


class Column(NamedTuple):
    """How a table shows the values of one key."""

    key: str
    title: str
    show: Callable[[Any], str] = text
    right: bool = False
    """Right-aligned, as for numbers."""
    style: Callable[[Any], str] | None = None
    """Maps a value to a rich style (``"red"``, ``"bold"``); terminals only."""


def texts(**titles: str) -> list[Column]:
    """Columns of text: keys of the rows, and their titles."""
    return [Column(key, title) for key, title in titles.items()]


def numbers(**titles: str) -> list[Column]:
    """Columns of numbers: keys of the rows, and their titles."""
    return [Column(key, title, number, right=True) for key, title in titles.items()]


def sizes(**titles: str) -> list[Column]:
    """Columns of bytes: keys of the rows, and their titles."""
    return [Column(key, title, size, right=True) for key, title in titles.items()]


def print_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], file: TextIO | None = None) -> None:
    """Print a header and one line per row. A key missing from a row is shown as None."""
    file = file or sys.stdout
    cells = _cells(columns, rows)
    if not file.isatty():
        _print_unshortened(columns, cells, file)
        return
    from rich.console import Console

    terminal = shutil.get_terminal_size()
    width = max(terminal.columns, _least_width(columns, cells))
    console = Console(file=file, highlight=False, emoji=False, width=width, height=terminal.lines)  # 80 if TERM=dumb
    console.print(rich_table(columns, rows))


def rich_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> Table:
    """The table that :func:`print_table` prints on a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for column in columns:
        side: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(Text(column.title), justify=side, no_wrap=column.right, overflow="fold")
    for row, shown in zip(rows, _cells(columns, rows), strict=True):
        styles = [column.style(row.get(column.key)) if column.style else "" for column in columns]
        table.add_row(*(Text(cell, style=style) for cell, style in zip(shown, styles, strict=True)))
    return table


def _cells(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [[visible_lines(column.show(row.get(column.key))) for column in columns] for row in rows]


def _least_width(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> int:
    """Least width at which numbers are not folded and texts keep :data:`FOLDED`; a narrower terminal wraps lines."""
    widths = _widths(columns, cells)
    return sum(
        (width if column.right else min(width, FOLDED)) + 2 for column, width in zip(columns, widths, strict=True)
    )


def _widths(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> list[int]:
    """Natural width of each column."""
    from rich.cells import cell_len

    lines = [[column.title for column in columns], *cells]
    return [max(cell_len(line[place]) for line in lines) for place in range(len(columns))]


def _print_unshortened(columns: Sequence[Column], cells: Sequence[Sequence[str]], file: TextIO) -> None:
    """One line per row, however long. Without rich, which takes a second for a thousand rows."""
    from rich.cells import cell_len

    lines = [[column.title for column in columns], *([cell.replace("\n", " ") for cell in row] for row in cells)]
    widths = _widths(columns, lines[1:])
    for line in lines:
        padded = []
        for column, cell, width in zip(columns, line, widths, strict=True):
            space = " " * (width - cell_len(cell))
            padded.append(space + cell if column.right else cell + space)
        print("  ".join(padded).rstrip(), file=file)


def print_rows(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print the rows as a table, or whole as JSON."""
    if as_json:
        print_json(rows)
    else:
        print_table(columns, rows)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print ``value`` as JSON, with non-finite numbers as ``"NaN"``, ``"Infinity"``, ``"-Infinity"``; without
    ``indent`` on one line."""
    print(json.dumps(to_json(value), indent=indent, allow_nan=False))


def print_facts(title: str, facts: Sequence[tuple[str, str]], file: TextIO | None = None) -> None:
    """Print a title and below it ``name  fact`` lines, wrapped on a narrow terminal."""
    file = file or sys.stdout
    width = max((len(name) for name, _ in facts), default=0)
    room = max(FOLDED, shutil.get_terminal_size().columns - width - 4) if file.isatty() else sys.maxsize
    print(f"\x1b[1m{title}\x1b[0m" if shows_colours(file) else title, file=file)
    for name, fact in facts:
        for line in textwrap.wrap(fact, room, break_long_words=False, break_on_hyphens=False) or [""]:
            print(f"  {name:<{width}}  {line}".rstrip(), file=file)
            name = ""


def in_words(record: Mapping[str, Any]) -> str:
    """``loss 3.21  grad_norm 0.53``; for lists and dicts their length in parentheses."""
    return "  ".join(f"{visible(name)} {_in_a_word(value)}" for name, value in record.items())


def _in_a_word(value: Any) -> str:
    if is_number(value):
        return number(value)
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return f"({len(value)})" if isinstance(value, (list, dict)) else visible(str(value))


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
