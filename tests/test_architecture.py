"""The rooms: who may import whom, how long a file may get, what must not load torch, and where the tests of each are.

A room is a module or a package directly under ``dalsegno``. It imports only from lower floors, or from its own floor
without a circle. Imports under ``TYPE_CHECKING`` count.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dalsegno
from support.imports import imports

SOURCE = Path(dalsegno.__file__).parent
TESTS = Path(__file__).parent
LONGEST = 600  # lines
MOST_FILES = {
    "analysis": 32,
    "args": 4,
    "callbacks": 41,
    "checkpoint": 41,
    "cli": 23,
    "config": 5,
    "control": 11,
    "data": 20,
    "diloco": 19,
    "distributed": 28,
    "events": 9,
    "interop": 22,
    "launcher": 10,
    "logs": 10,
    "policies": 4,
    "stateful": 4,
    "system": 13,
    "testing": 7,
    "training": 33,
    "web": 5,
    "witness": 4,
}
"""Of each room: few enough to be found by their names. A subject that grows gets a longer file before a second one."""
LONGEST_CONSTRUCTOR = 50  # lines of the Trainer's: one screen
IMPORTS_TORCHDATA = re.compile(r"^\s*(from|import) torchdata\b", re.MULTILINE)
LOOKS_AT_CALLERS = re.compile(r"\b(_getframe|currentframe|f_back|inspect\.stack)\b")

FLOORS = [
    ["errors"],
    # the contract of what is saved, and what everything stands on
    ["state", "stateful", "policies", "system", "distributed"],
    # settings, and the records that a run writes
    ["args", "logs"],
    # the HTTP stack
    ["web"],
    # reading logs; reading data; the events of a run; commands to a run from outside
    ["analysis", "data", "events", "control", "witness"],
    # what listens to a run, where its state is saved, and one run of many machines
    ["callbacks", "interop", "checkpoint", "diloco"],
    # the engine, and runs described in a file
    ["training", "config"],
    # starting ranks; for users' own tests
    ["launcher", "testing"],
    # what people type
    ["cli"],
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FLOORS_WITHIN = {
    "checkpoint": [
        # the files
        ["names", "file_reading", "manifest", "checkpoint_dir", "sharding", "tensor_files", "index"],
        ["codec", "sidecar"],
        # what is saved
        ["contract", "tensor_reader", "wrapped"],
        ["model_state", "optimizer_schema", "optimizer_state"],
        # a save
        ["staging", "file_writing", "plan"],
        # a load
        ["compatibility", "frozen_checksums", "restore"],
        ["snapshot", "async_save"],
        # reading without a model
        ["json_view", "listing", "difference"],
        ["export"],
        ["weights"],
        ["foreign", "remote"],
        # the checkpoints of a run
        ["manager"],
        ["memory_dir"],
        ["in_memory"],
    ],
}
MODULES_AT_THE_TOP = {"errors", "state"}

TESTED_ELSEWHERE: dict[str, str] = {}
"""Folders within rooms, each with the folder of its tests."""

MUST_NOT_KNOW = {
    "checkpoint": {"events", "state"},  # it saves whatever has a state
    "data": {"events", "state"},
}

WITHOUT_TORCH = [
    "errors",
    "state",
    "stateful.annotations",
    "stateful.component",
    "stateful.schema",
    "policies",
    "args",
    "system.exit_status",
    "system.filesystem",
    "system.lock",
    "system.urls",
    "system.worker",
    "logs",
    "analysis",
    "analysis.divergence",
    "control.api",
    "control.client",
    "control.commands",
    "control.feed",
    "control.inbox",
    "control.jobs",
    "control.queue",
    "control.server",
    "web.answers",
    "web.connections",
    "web.security",
    "web.server",
    "events.table",
    "events.callback",
    "checkpoint.listing",
    "checkpoint.json_view",
]


def modules() -> dict[str, Path]:
    """Dotted name to file, without the package itself, which only hands out names, and its ``__main__``."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(["dalsegno", *(parts[:-1] if parts[-1] == "__init__" else parts)])
        if name not in ("dalsegno", "dalsegno.__main__"):
            found[name] = path
    return found


def imported(name: str, path: Path) -> Iterator[str]:
    """What a module imports of dalsegno, wherever in the file it does so."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in imports(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("dalsegno."))
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            if origin.split(".")[0] == "dalsegno":
                for alias in node.names:
                    inner = f"{origin}.{alias.name}"
                    yield inner if inner in MODULES else origin


MODULES = modules()
IMPORTS = {name: set(imported(name, path)) for name, path in MODULES.items()}


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_every_room_has_its_floor() -> None:
    assert sorted({room_of(name) for name in MODULES}) == sorted(FLOOR_OF)


def test_no_loose_modules() -> None:
    loose = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert loose == MODULES_AT_THE_TOP


@pytest.mark.parametrize("room", FLOOR_OF)
def test_a_room_imports_from_its_floor_or_lower_ones(room: str) -> None:
    upward = [
        f"{name} imports {other}"
        for name, others in IMPORTS.items()
        for other in others
        if room_of(name) == room and FLOOR_OF[room_of(other)] > FLOOR_OF[room]
    ]
    assert upward == []


@pytest.mark.parametrize("room", FLOORS_WITHIN)
def test_a_room_with_floors_of_its_own_imports_downwards(room: str) -> None:
    floor_of = {part: number for number, parts in enumerate(FLOORS_WITHIN[room]) for part in parts}
    inside = {name: name.split(".")[2] for name in MODULES if name.startswith(f"dalsegno.{room}.")}
    assert sorted(set(inside.values())) == sorted(floor_of)
    upward = [
        f"{name} imports {other}"
        for name, part in inside.items()
        for other in IMPORTS[name] & inside.keys()
        if floor_of[inside[other]] > floor_of[part]
    ]
    assert upward == []


def test_nobody_imports_in_circles() -> None:
    between_rooms: dict[str, set[str]] = {}
    for name, others in IMPORTS.items():
        between_rooms.setdefault(room_of(name), set()).update({room_of(other) for other in others} - {room_of(name)})
    for graph in (between_rooms, IMPORTS):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(f"a circle: {' → '.join(error.args[1])}")


@pytest.mark.parametrize("room", MUST_NOT_KNOW)
def test_what_a_room_must_not_know(room: str) -> None:
    known = {room_of(other) for name, others in IMPORTS.items() if room_of(name) == room for other in others}
    assert known & MUST_NOT_KNOW[room] == set()


def folders_within_rooms() -> Iterator[str]:
    """Those that have modules, as ``checkpoint/foreign``; not those of a web page alone."""
    for folder in SOURCE.glob("*/*/"):
        if any(path.name != "__init__.py" for path in folder.glob("*.py")):
            yield folder.relative_to(SOURCE).as_posix()


def test_each_folder_within_a_room_has_its_tests() -> None:
    tested = [TESTED_ELSEWHERE.get(folder, folder) for folder in folders_within_rooms()]
    assert [folder for folder in tested if not any((TESTS / folder).glob("test_*.py"))] == []


def test_a_folder_of_tests_is_that_of_a_room_or_within_one() -> None:
    """Or that of a module with several. Folders without a room are about the whole: ``docs``, ``durability`` …"""
    mirrors = {
        SOURCE / path.parent.relative_to(TESTS) for room in FLOOR_OF for path in TESTS.glob(f"{room}/**/test_*.py")
    }
    assert sorted(path for path in mirrors if not (path.is_dir() or path.with_suffix(".py").exists())) == []


@pytest.mark.parametrize("room", sorted({folder.partition("/")[0] for folder in folders_within_rooms()}))
def test_a_test_of_one_folder_within_a_room_is_in_that_folder(room: str) -> None:
    """It is a test of one folder if it imports nothing else of its room."""
    misplaced = []
    for path in TESTS.glob(f"{room}/test_*.py"):
        if len(parts := parts_imported(path, room)) == 1 and (SOURCE / room / (part := parts.pop())).is_dir():
            misplaced.append(f"{path.name} belongs in tests/{room}/{part}")
    assert misplaced == []


def parts_imported(test: Path, room: str) -> set[str]:
    """Names below ``dalsegno.<room>``: modules and folders, and what is imported of the room itself."""
    found = set()
    for node in imports(test):
        if isinstance(node, ast.Import):
            origins = [alias.name for alias in node.names]
        else:
            origins = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {origin.split(".")[2] for origin in origins if origin.startswith(f"dalsegno.{room}.")}
    return found


def test_no_file_is_too_long() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_a_room_has_few_files() -> None:
    files = {room: [path for path in MODULES.values() if path.is_relative_to(SOURCE / room)] for room in MOST_FILES}
    assert {room: len(of_room) for room, of_room in files.items() if len(of_room) > MOST_FILES[room]} == {}
    assert MOST_FILES.keys() == FLOOR_OF.keys() - MODULES_AT_THE_TOP


def test_the_trainer_is_built_on_one_screen() -> None:
    tree = ast.parse(MODULES["dalsegno.training.trainer"].read_text())
    constructors = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    assert [node.end_lineno - node.lineno < LONGEST_CONSTRUCTOR for node in constructors if node.end_lineno] == [True]


def test_nobody_looks_at_callers() -> None:
    """What a function does depends on its arguments."""
    assert [name for name, path in MODULES.items() if LOOKS_AT_CALLERS.search(path.read_text())] == []


def test_rooms_without_torch_load_none() -> None:
    """In a process of its own, one import after the other."""
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name + ' loads torch'\n"
    )
    names = ["dalsegno", *(f"dalsegno.{room}" for room in WITHOUT_TORCH)]
    done = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_found_and_no_other() -> None:
    for name in dir(dalsegno):
        getattr(dalsegno, name)
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'"):
        dalsegno.Trainr  # noqa: B018


def test_one_module_imports_torchdata() -> None:
    importing = {path.name for path in SOURCE.rglob("*.py") if IMPORTS_TORCHDATA.search(path.read_text())}
    assert importing == {"torchdata_loaders.py"}
