"""The live page of a DiLoCo server: workers, rounds, bytes, staleness, outer loss.

It contains nothing of the run; it asks for that with the token.
"""

from __future__ import annotations

import functools
from importlib.resources import files

import dalsegno.control.page
from dalsegno.analysis.webpage import inlined
from dalsegno.control.page import Page


@functools.cache
def live_page() -> Page:
    """The page, the same for every run."""
    own, control = files(__name__), files(dalsegno.control.page)
    parts = inlined(styles=[own / "page.css"], scripts=[control / "connection.js", own / "page.js"], has_charts=False)
    return Page.of(own / "page.html", parts)
