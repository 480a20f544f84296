"""The pages that are made from the code, and the examples in them."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

import dalsegno
from dalsegno import analysis, callbacks, testing
from support.docs_scripts import script

ROOT = Path(__file__).parents[2]


MADE = sorted(path for path in (ROOT / "docs").rglob("*.py") if "def pages()" in path.read_text())


@pytest.mark.parametrize("made", MADE, ids=lambda path: path.stem)
def test_pages_made_from_the_code_are_up_to_date(made: Path) -> None:
    name = made.relative_to(ROOT / "docs").with_suffix("").as_posix()
    for path, text in script(name).pages().items():
        assert path.read_text(encoding="utf-8") == text, f"run: python docs/{name}.py"


def test_the_table_and_the_picture_of_the_benchmarks_show_their_results() -> None:
    module = script("images/benchmarks")
    results = module.merged([module.RESULTS])
    text = module.PAGE.read_text(encoding="utf-8")
    assert module.page(text, results) == text, "run: python docs/images/benchmarks.py"
    short = module.CHOSEN_PAGE.read_text(encoding="utf-8")
    assert module.chosen_page(short, results) == short, "run: python docs/images/benchmarks.py"
    picture = module.picture(module.rows_of(results))
    assert module.PICTURE.read_text(encoding="utf-8") == picture, "run: python docs/images/benchmarks.py"
    assert picture.count("<circle") > 20


ROW = {
    "what": "w",
    "ours": "3 s",
    "peer": "p: 2 s",
    "ratio": "1.50 ×",
    "target": "≤ 1.2 ×",
    "met": False,
    "spread": 0.1,
}


def test_a_benchmark_that_misses_its_target_is_drawn_right_of_one_with_its_spread() -> None:
    module = script("images/benchmarks")
    picture = module.picture([ROW, {**ROW, "met": None, "spread": None}])
    (place,) = re.findall(r"<circle cx='([\d.]+)'", picture)
    assert float(place) > module._x(1.0)
    assert picture.count("stroke-width='2'") == 1 and picture.count(module.MISSED) == 2
    assert "| 1.50 × | ± 10 % | ≤ 1.2 × | NO |" in module.table([ROW])


def test_results_of_some_benchmarks_replace_their_own_rows_and_no_others(tmp_path: Path) -> None:
    module = script("images/benchmarks")
    machine = {"processor": "a CPU", "cores": 2, "load": "0.5"}
    former = {"timestamp": None, "machine": machine, "versions": {"torch": "2.12"}, "rows": [ROW]}
    later = {**former, "timestamp": 0.0, "versions": {"torch": "2.13"}, "rows": [{**ROW, "ratio": "1.10 ×"}]}
    for name, content in (("old", {"loop": former, "save": former}), ("new", {"loop": later})):
        (tmp_path / name).write_text(json.dumps({"benchmarks": content}), encoding="utf-8")
    results = module.merged([tmp_path / "old", tmp_path / "new"])
    assert [row["ratio"] for row in module.rows_of(results)] == ["1.10 ×", "1.50 ×"]

    text = f"before\n{module.BEGIN}former table\n{module.END}after\n"
    page = module.page(text, results)
    assert page.startswith(f"before\n{module.BEGIN}") and page.endswith(f"|\n\n{module.END}after\n")
    assert "Measured on 1970-01-01, on a CPU, 2 cores, with torch 2.13: `loop`." in page
    assert "Measured on a CPU, 2 cores, with torch 2.12: `save`." in page and "Beside other work" not in page
    results["loop"]["machine"]["load"] = "2.5"
    assert "Beside other work on the machine: `loop`." in module.page(page, results)


@pytest.mark.parametrize("text", ["{BEGIN}table\nwords\n", "words\n", "{END}{BEGIN}", "{BEGIN}{BEGIN}{END}"])
def test_a_page_without_its_marks_is_left_as_it_is(text: str) -> None:
    module = script("images/benchmarks")
    with pytest.raises(ValueError, match="each once"):
        module.page(text.format(BEGIN=module.BEGIN, END=module.END), {})


def test_every_public_name_can_be_had_and_is_announced() -> None:
    for name in dir(dalsegno):
        assert getattr(dalsegno, name) is not None
    package = ROOT / "src" / "dalsegno"
    imported = re.findall(r"from \.([\w.]+) import \w+ as (\w+)", (package / "__init__.py").read_text())
    modules = {".".join(path.relative_to(package).with_suffix("").parts) for path in package.rglob("*.py")}
    for_type_checkers = {name for module, name in imported if {module, f"{module}.__init__"} & modules}
    assert for_type_checkers == set(dir(dalsegno))


def test_a_name_of_the_reference_means_one_thing() -> None:
    for one, other in itertools.combinations((dalsegno, analysis, callbacks, testing), 2):
        shared = {name for name in {*dir(one)} & {*dir(other)} if not name.startswith("_")}
        assert [name for name in shared if getattr(one, name) is not getattr(other, name)] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trianer'"):
        _ = dalsegno.Trianer


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_rows_of_a_table_have_as_many_cells_as_its_head(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = table.splitlines()
        assert {row: len(re.findall(r"(?<!\\)\|", row)) for row in rows} == dict.fromkeys(rows, rows[0].count("|"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^\[[\w-]+\]: (\S+)$", r"[](\1)", page.read_text(), flags=re.MULTILINE)  # as README's table has them
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)]*)\)", text):
        if not target.startswith(("http://", "https://")):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(path), f"{page.name}: {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Of the page's headings, as the site and forges make them, and those that it has of its own."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    texts = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    own = re.findall(r'<a id="([^"]+)">', text)
    return {*own, *(re.sub(r"[^\w\s-]", "", text).replace(" ", "-") for text in texts)}


def test_every_builtin_callback_is_described_once_where_it_can_be_found() -> None:
    folder = ROOT / "docs/reference/callbacks"
    headings = {path.name: re.findall(r"^## (\w+)$", path.read_text(), re.MULTILINE) for path in folder.glob("*.md")}
    described = [(page, name) for page, names in headings.items() for name in names]
    assert sorted(name for _, name in described) == callbacks.__all__
    overview = (folder / "index.md").read_text()
    assert [name for page, name in described if f"[`{name}`]({page}#{name.lower()})" not in overview] == []
