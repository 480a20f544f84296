"""Hook of the documentation site: cross-references in docstrings, written for readers of the code, become code."""

from __future__ import annotations

import re
from typing import Any

ROLE = re.compile(r":(?:class|data|func|meth|mod|attr|exc):<code>(~?)([\w.]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """``:class:`~dalsegno.Trainer``` shows as ``Trainer``."""
    return ROLE.sub(lambda role: f"<code>{role[2].rpartition('.')[2] if role[1] else role[2]}</code>", html)
