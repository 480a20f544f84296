"""``make docs`` builds the site without a warning; here its parts that cost little."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import dalsegno
from dalsegno import errors
from support.docs_scripts import DOCS, script

ROOT = Path(__file__).parents[2]


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"(?:- |: )([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert listed == pages


def test_every_page_is_reached_from_the_first() -> None:
    reached, unread = set(), {DOCS / "index.md"}
    while unread:
        page = unread.pop()
        reached.add(page)
        links = re.findall(r"\]\(([^)#:\s]+\.md)", page.read_text(encoding="utf-8"))
        unread |= {(page.parent / link).resolve() for link in links} - reached
    assert set(DOCS.rglob("*.md")) - reached == set()


def test_the_reference_has_every_public_name() -> None:
    shown = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference" / "python").glob("*.md"))
    elsewhere = {*vars(errors), "analysis"}
    assert [name for name in dir(dalsegno) if name not in elsewhere and f".{name}\n" not in shown] == []


@pytest.mark.parametrize(
    ("html", "shown"),
    [
        ("see :class:<code>~dalsegno.Trainer</code>.", "see <code>Trainer</code>."),
        ("see :func:<code>open_log</code>.", "see <code>open_log</code>."),
        ("<code>a: b</code>", "<code>a: b</code>"),
        (r"<td><code>a \| b</code></td>", "<td><code>a | b</code></td>"),
        ("<p>see:</p><p>::</p><p>A file::</p>", "<p>see:</p><p>A file:</p>"),
        (r"<code>a\|b</code>", r"<code>a\|b</code>"),
        ("see docs/guides/control.md.", 'see <a href="../../../guides/control/">docs/guides/control.md</a>.'),
    ],
)
def test_roles_and_pages_in_docstrings_become_code_and_links(html: str, shown: str) -> None:
    assert script("site").on_page_content(html, SimpleNamespace(url="reference/python/dalsegno/")) == shown


def test_pages_that_the_code_names_exist() -> None:
    named = {
        name for path in (ROOT / "src").rglob("*.py") for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text())
    }
    assert "docs/guides/control.md" in named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
