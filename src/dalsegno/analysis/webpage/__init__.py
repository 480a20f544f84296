"""Web pages in one file, with charts: the scripts here draw them, for a report and for the live page of job control."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable

SHOWN_FIRST = ("grad_norm", "learning_rate")
"""Charts shown initially, beside the loss."""


def inlined(folder: Traversable, *, styles: Sequence[str], scripts: Sequence[str]) -> dict[str, str]:
    """Parts of a page: ``style`` and ``script``, their hashes for its Content-Security-Policy, ``curves``.

    ``curves`` are the elements that the charts and their controls need.

    Args:
        folder: with the page's own files, which follow the shared ones.
        styles: names of its style sheets.
        scripts: names of its scripts. All share one scope.
    """
    shared = files(__name__)
    style = _joined(shared, ["page.css"]) + _joined(folder, styles)
    script = _joined(shared, ["curves.js", "chart.js", "controls.js"]) + _joined(folder, scripts)
    return {
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
        "curves": _joined(shared, ["curves.html"]),
    }


def _joined(folder: Traversable, names: Sequence[str]) -> str:
    return "".join(folder.joinpath(name).read_text("utf-8") for name in names)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
