"""What scripts write into the page beside them: a table made from the code, between two comments."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parent
END = "<!-- end -->\n"


def page_with(table: str, script: str) -> dict[Path, str]:
    """Return the page beside ``script``, a path, with its current table."""
    page = Path(script).with_suffix(".md")
    begin = f"<!-- written by docs/{Path(script).relative_to(DOCS).as_posix()} -->\n"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    return {page: before + begin + table + END + rest.partition(END)[2]}


def write(pages: dict[Path, str]) -> None:
    """Write each page."""
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
