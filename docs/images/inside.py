"""Draws the pictures of docs/why/inside.md: ``python docs/images/inside.py``. A test compares them with the code.

``rooms.svg``: the packages on their floors, from the table of tests/test_architecture.py and their docstrings.
``ways.svg``: a step, a save and a resume through the rooms. Every name in it is looked up in the code.
"""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FONT = "font-family='-apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif'"
INK, GREY, LINE, PAPER = "#1f2328", "#59636e", "#8c959f", "#ffffff"
FLOOR_FILL = ["#fff8c5", "#fbefd9", "#e6f4ea", "#ddf4ff", "#ece3fb", "#ffe9ec", "#f0f0f0", "#e7ecf0"]


class Stop(NamedTuple):
    """One station of a way: ``module:name`` below ``dalsegno``, and what it does."""

    name: str
    does: str
    in_background: bool = False


STEP = [
    Stop("training.trainer:Trainer.train", "lock output_dir, restore, run the loop"),
    Stop("training.loop:train", "the loop, on one screen"),
    Stop("training.session:Session.timelines", "epochs; what the next step's end will do"),
    Stop("data.step_batch:iter_steps", "which samples a step takes"),
    Stop("witness:Witness.begin_step", "digests of what goes in, to prove the next resume"),
    Stop("training.train_step:TrainStep", "accumulate, clip, update, schedule"),
    Stop("training.session:Session.step_end", "count the step; on_step_end"),
    Stop("training.step_boundary:StepBoundary.run_due_actions", "log, evaluate, save, stop: all ranks together"),
]
SAVE = [
    Stop("training.step_boundary:StepBoundary.run_due_actions", "a save is due, or requested on any rank"),
    Stop("training.save_coordinator:SaveCoordinator.save", "one at a time; on_before_save"),
    Stop("training.checkpoint_contents:CheckpointContents.components", "what is saved: tensors and components"),
    Stop("checkpoint.manager:CheckpointManager.save_async", "the checkpoints of a run"),
    Stop("checkpoint.snapshot:Snapshotter.capture", "copies into buffers while training waits"),
    Stop("checkpoint.async_save:AsyncSave", "streams files to disk, with checksums", True),
    Stop("checkpoint.checkpoint_dir:publish", "writes the manifest, then renames", True),
    Stop("training.save_coordinator:SaveCoordinator.finalize", "at a later boundary: on_save"),
]
RESUME = [
    Stop("training.trainer:Trainer.train", "resume_from_checkpoint=True"),
    Stop("training.lifecycle:RunLifecycle.restore", "under the lock of output_dir"),
    Stop("training.checkpoint_sources:CheckpointSources.newest", "in memory, on disk, at the URL"),
    Stop("checkpoint.manager:CheckpointManager.find", "verifies every byte, quarantines damaged ones"),
    Stop("training.checkpoint_sources:CheckpointSources.load", "what is to be loaded"),
    Stop("checkpoint.manager:CheckpointManager.load", "compares everything, then loads"),
    Stop("logs.rewind:rewind", "archives what came later; logs/writer.py cuts it"),
]


def floors() -> list[list[str]]:
    """The table of the architecture test, the lowest floor first."""
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text())
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "FLOORS"
    )
    return [list(floor) for floor in ast.literal_eval(table)]


def subject(room: str) -> str:
    """The first clause of a room's docstring."""
    path = ROOT / "src" / "dalsegno" / room
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    doc = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return re.sub(r":\w+:`([^`]+)`", r"\1", doc).rstrip(".").replace("``", "")


def text(x: float, y: float, words: str, *, size: int = 13, fill: str = INK, weight: str = "normal") -> str:
    return f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{fill}' font-weight='{weight}'>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='6' fill='{fill}' stroke='{LINE}'/>"


def picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' {FONT}>"
    paper = f"<rect width='{width}' height='{height}' fill='{PAPER}'/>"
    return "\n".join([head, f"<title>{escape(title)}</title>", paper, *parts, "</svg>", ""])


def rooms() -> str:
    """The house: a row for each floor, the top floor first; a room imports only from lower rows."""
    table, width, gap, y = floors(), 1000, 8, 34
    parts = [text(10, 20, "A room imports only from lower floors", fill=GREY)]
    for number, floor in reversed(list(enumerate(table))):
        each = (width - 20 - gap * (len(floor) - 1)) / len(floor)
        subjects = [textwrap.wrap(subject(room), int((each - 16) / 5.7)) for room in floor]
        height = 32 + 14 * max(map(len, subjects))
        for column, (room, lines) in enumerate(zip(floor, subjects, strict=True)):
            x = 10 + column * (each + gap)
            parts.append(box(x, y, each, height, FLOOR_FILL[number % len(FLOOR_FILL)]))
            parts.append(text(x + 10, y + 21, room, size=14, weight="bold"))
            for line, words in enumerate(lines):
                parts.append(text(x + 10, y + 38 + 14 * line, words, size=11, fill=GREY))
        y += height + gap
    return picture(width, y, "The rooms of dalsegno on their floors", parts)


def ways() -> str:
    """Three columns: a step, a save, a resume."""
    width, column, height, gap = 1000, 320, 56, 22
    columns = {"A step": STEP, "A save": SAVE, "A resume": RESUME}
    parts = [
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0,0 L8,4 L0,8 z' fill='{LINE}'/></marker></defs>"
    ]
    for place, (title, stops) in enumerate(columns.items()):
        x = 10 + place * (column + 10)
        parts.append(text(x, 22, title, size=16, weight="bold"))
        for row, stop in enumerate(stops):
            y = 36 + row * (height + gap)
            module, _, name = stop.name.partition(":")
            parts.append(box(x, y, column, height, "#ddf4ff" if stop.in_background else "#f6f8fa"))
            parts.append(text(x + 10, y + 18, name, weight="bold"))
            parts.append(text(x + 10, y + 33, f"{module.replace('.', '/')}.py", size=10, fill=GREY))
            parts.append(text(x + 10, y + 48, stop.does, size=11, fill=GREY))
            if row:
                middle = x + column / 2
                parts.append(
                    f"<path d='M{middle:g},{y - gap} L{middle:g},{y - 2}' stroke='{LINE}' marker-end='url(#tip)'/>"
                )
    longest = max(map(len, columns.values()))
    foot = 36 + longest * (height + gap) + 4
    parts += [box(10, foot, 14, 14, "#ddf4ff"), text(30, foot + 12, "on a background thread", size=11, fill=GREY)]
    return picture(width, foot + 26, "A step, a save and a resume through the rooms", parts)


def unknown() -> Iterator[str]:
    """Names in the pictures that the code does not have."""
    for stop in (*STEP, *SAVE, *RESUME):
        module, _, name = stop.name.partition(":")
        try:
            attrgetter(name)(importlib.import_module(f"dalsegno.{module}"))
        except (ImportError, AttributeError) as error:
            yield f"{stop.name}: {error}"


PICTURES = {HERE / "rooms.svg": rooms, HERE / "ways.svg": ways}


if __name__ == "__main__":
    for path, draw in PICTURES.items():
        path.write_text(draw())
