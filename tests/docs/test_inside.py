"""The page about the inside: what it names exists, and a run passes the stations of its picture in their order."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import threading
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from dalsegno.callbacks import JsonLogger
from support.docs_scripts import script
from support.small import small_trainer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "why" / "inside.md"
OF_TORCH = ["SimpleElasticAgent"]


def test_the_pictures_of_the_rooms_show_them() -> None:
    module = script("images/inside")
    assert list(module.unknown()) == []
    for path, draw in module.PICTURES.items():
        assert path.read_text() == draw(), "run: python docs/images/inside.py"


def test_files_that_it_names_exist() -> None:
    named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", PAGE.read_text())
    rooms = ROOT / "src" / "dalsegno"
    assert len(named) > 15
    assert [name for name in named if not ((rooms / name).exists() or (ROOT / name).exists())] == ["rewound/"]


def test_classes_and_methods_that_it_names_exist() -> None:
    named = re.findall(r"`([A-Z][a-z]\w+)(?:\.(\w+))?`", PAGE.read_text())
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    assert len(named) > 15
    assert [name for name, method in named if not any(has(text, name, method) for text in sources)] == OF_TORCH


def has(source: str, name: str, method: str) -> bool:
    found = re.search(rf"^class {name}\b.*?(?=^\w|\Z)", source, re.MULTILINE | re.DOTALL)
    return found is not None and (not method or f"    def {method}(" in found[0])


def code_of(station: str) -> CodeType:
    """What runs at ``module:name``: of a class, its ``__call__`` or ``_run``, else its ``__init__``."""
    module, _, name = station.partition(":")
    found = attrgetter(name)(importlib.import_module(f"dalsegno.{module}"))
    if isinstance(found, type):
        found = next(vars(found)[each] for each in ("__call__", "_run", "__init__") if each in vars(found))
    code: CodeType = inspect.unwrap(found).__code__
    return code


def passed(stations: list[str], work: Callable[[], object]) -> list[str]:
    """The stations in the order in which ``work`` enters them, on any thread, each as often as it does."""
    names = {code_of(station): station for station in stations}
    entered = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in names:
            entered.append(names[frame.f_code])

    former = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(former)
        threading.setprofile(former)
    return entered


def test_a_run_passes_the_stations_of_the_picture_in_their_order(tmp_path: Path) -> None:
    ways = script("images/inside")
    settings = {"max_steps": 5, "save_steps": 2, "logging_steps": 1}

    def begin() -> None:
        small_trainer(tmp_path, JsonLogger(), **{**settings, "max_steps": 3}).train()

    def resume() -> None:
        small_trainer(tmp_path, JsonLogger(), **settings).train()

    for work, columns in ((begin, [ways.STEP, ways.SAVE]), (resume, [ways.RESUME])):
        stations = [[stop.name for stop in column] for column in columns]
        entered = passed([name for each in stations for name in each], work)
        for each in stations:
            rest = iter(entered)
            assert [name for name in each if name not in rest] == [], entered
