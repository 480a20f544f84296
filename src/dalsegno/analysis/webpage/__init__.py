"""Web pages in one file, with charts: the scripts here draw them, for a report and for the live page of job control."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable

SHOWN_FIRST = ("grad_norm", "learning_rate")  # charts shown initially, beside the loss


def inlined(
    *, styles: Sequence[Traversable], scripts: Sequence[Traversable], has_charts: bool = True
) -> dict[str, str]:
    """Parts of a page: ``style`` and ``script``, their hashes for its Content-Security-Policy, ``curves``.

    ``curves`` are the elements that the charts and their controls need.

    Args:
        styles: the page's own style sheets, which follow the shared one.
        scripts: its own scripts, which follow the shared ones. All share one scope.
        has_charts: whether it needs the shared scripts.
    """
    shared = files(__name__)
    style = _joined([shared / "page.css", *styles])
    charts = [shared / name for name in ("curves.js", "chart.js", "controls.js")] if has_charts else []
    script = _joined([*charts, *scripts])
    return {
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
        "curves": _joined([shared / "curves.html"]),
    }


def _joined(files: Sequence[Traversable]) -> str:
    return "".join(file.read_text("utf-8") for file in files)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
