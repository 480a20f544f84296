"""The live page of job control, as one file: it asks the server that it is from, and nothing else.

Its Content-Security-Policy allows its own script and style only, by hash. It contains nothing of a run: what it shows
comes with the token, which it takes from the fragment of its address.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from string import Template

from starlette.responses import Response

from dalsegno.analysis.formats.source import BOOKKEEPING, EVALUATIONS, SETTING
from dalsegno.analysis.plotting.curves import LABELS, RUNS, TOKENS
from dalsegno.analysis.webpage import SHOWN_FIRST, inlined
from dalsegno.logs.values import WALL_CLOCK_ENDINGS

SCRIPTS = ("connection.js", "growing.js", "job.js", "live.js")


@functools.cache
def live_page() -> Response:
    """The page, the same for every job."""
    folder = files(__name__)
    parts = inlined(styles=[folder / "live.css"], scripts=[folder / name for name in SCRIPTS])
    names = {
        "bookkeeping": BOOKKEEPING,
        "evaluations": EVALUATIONS,
        "settings": SETTING,
        "tokens": TOKENS,
        "labels": LABELS,
        "colours": RUNS,
        "shown": SHOWN_FIRST,
        "durations": WALL_CLOCK_ENDINGS,
    }
    template = Template((folder / "page.html").read_text("utf-8"))
    policy = {
        "default-src": "'none'",
        "script-src": f"'{parts['script_hash']}'",
        "style-src": f"'{parts['style_hash']}'",
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(template.substitute(parts, names=json.dumps(names)), headers=headers)
