"""Web pages in one file, with charts: the scripts here draw them, for a report and for the live page of job control."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable

SHOWN_FIRST = ("grad_norm", "learning_rate")  # charts shown initially, beside the loss


def inlined(*, styles: Sequence[Traversable], scripts: Sequence[Traversable]) -> dict[str, str]:
    """Parts of a page: ``style`` and ``script``, their hashes for its Content-Security-Policy, and ``curves``, the
    elements that the charts and their controls need.

    The page's own styles and scripts follow the shared ones. All scripts share one scope.
    """
    shared = files(__name__)
    style = _joined([shared / "page.css", *styles])
    script = _joined([*(shared / name for name in ("curves.js", "chart.js", "controls.js")), *scripts])
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
