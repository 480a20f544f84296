"""The pages that are made from the code, and the examples in them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

import dalsegno
from dalsegno import callbacks

ROOT = Path(__file__).parents[2]


def script(name: str) -> Any:
    """A script of docs/, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name.replace('/', '_')}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["data", "events", "other-names", "own-loop", "trainer"])
def test_a_page_made_from_the_code_is_up_to_date(name: str) -> None:
    module = script(name)
    assert module.PAGE.read_text() == module.page(), f"run: python docs/{name}.py"


def test_the_pictures_of_the_rooms_show_them() -> None:
    module = script("images/inside")
    assert list(module.unknown()) == []
    for path, draw in module.PICTURES.items():
        assert path.read_text() == draw(), "run: python docs/images/inside.py"


def test_the_table_and_the_picture_of_the_benchmarks_show_their_results() -> None:
    module = script("images/benchmarks")
    result = json.loads(module.RESULTS.read_text(encoding="utf-8"))
    text = module.PAGE.read_text(encoding="utf-8")
    assert module.page(text, result) == text, "run: python docs/images/benchmarks.py"
    picture = module.picture(result)
    assert module.PICTURE.read_text(encoding="utf-8") == picture, "run: python docs/images/benchmarks.py"
    assert picture.count("<circle") > 20


def test_a_benchmark_that_misses_its_target_is_drawn_right_of_one_with_its_spread() -> None:
    module = script("images/benchmarks")
    row = {"what": "w", "ours": "3 s", "peer": "p: 2 s", "ratio": "1.50 ×", "target": "≤ 1.2 ×", "met": False}
    missed, unknown = {**row, "spread": 0.1}, {**row, "met": None, "spread": None}
    picture = module.picture({"rows": [missed, unknown]})
    (place,) = re.findall(r"<circle cx='([\d.]+)'", picture)
    assert float(place) > module._x(1.0)
    assert picture.count("stroke-width='2'") == 1 and picture.count(module.MISSED) == 2
    assert "| 1.50 × | ± 10 % | ≤ 1.2 × | NO |" in module.table([missed])


def test_files_that_the_page_about_the_rooms_names_exist() -> None:
    page = (ROOT / "docs" / "inside.md").read_text()
    named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", page)
    rooms = ROOT / "src" / "dalsegno"
    assert len(named) > 15
    assert [name for name in named if not ((rooms / name).exists() or (ROOT / name).exists())] == ["rewound/"]


def test_every_public_name_can_be_had_and_is_announced() -> None:
    for name in dir(dalsegno):
        assert getattr(dalsegno, name) is not None
    package = ROOT / "src" / "dalsegno"
    imported = re.findall(r"from \.([\w.]+) import \w+ as (\w+)", (package / "__init__.py").read_text())
    modules = {".".join(path.relative_to(package).with_suffix("").parts) for path in package.rglob("*.py")}
    for_type_checkers = {name for module, name in imported if {module, f"{module}.__init__"} & modules}
    assert for_type_checkers == set(dir(dalsegno))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trianer'"):
        _ = dalsegno.Trianer


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]), ids=lambda path: path.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_builtin_callback_has_a_page_that_can_be_found() -> None:
    pages = {
        path.read_text().splitlines()[0].removeprefix("# "): path for path in (ROOT / "docs/callbacks").glob("*.md")
    }
    assert set(callbacks.__all__) <= set(pages)
    overview = (ROOT / "docs" / "callbacks.md").read_text()
    for name, path in pages.items():
        assert f"[`{name}`](callbacks/{path.name})" in overview
