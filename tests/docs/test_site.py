"""``make docs`` builds the site without a warning; here its parts that cost little."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_every_page_is_in_the_navigation_or_listed_by_another() -> None:
    listed = set(re.findall(r"- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert listed <= pages
    assert {page for page in pages - listed if not page.startswith("callbacks/")} == set()


def test_the_reference_has_every_public_package() -> None:
    shown = {path.read_text().split("::: ")[1].strip() for path in (DOCS / "reference").glob("*.md")}
    assert shown == {"dalsegno", *(f"dalsegno.{name}" for name in ("analysis", "callbacks", "errors", "testing"))}


@pytest.mark.parametrize(
    ("html", "shown"),
    [
        ("see :class:<code>~dalsegno.Trainer</code>.", "see <code>Trainer</code>."),
        ("see :func:<code>open_log</code>.", "see <code>open_log</code>."),
        ("<code>a: b</code>", "<code>a: b</code>"),
    ],
)
def test_roles_in_docstrings_become_code(html: str, shown: str) -> None:
    spec = importlib.util.spec_from_file_location("docs_site", DOCS / "site.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    assert hook.on_page_content(html) == shown
