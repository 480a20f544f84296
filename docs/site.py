"""Hook of the documentation site: references in docstrings, written for readers of the code, fit the site.

Roles such as ``:class:`` become code, and names of pages such as ``docs/guides/data.md`` links; options are not broken.
The two colons before an example become one.
Code in a table's cell shows a bar without the backslash that forges need there.
"""

from __future__ import annotations

import re
from typing import Any

REFERENCE = "reference/"
CELL = re.compile(r"<td>.*?</td>", re.DOTALL)
OPTION = re.compile(r"<code>(--?[\w-]+)</code>")
PAGE = re.compile(r"\bdocs/([\w/-]+)\.md\b")
ROLE = re.compile(r":(?:class|data|func|meth|mod|attr|exc):<code>(~?)([\w.]+)</code>")


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """``:class:`~dalsegno.Trainer``` shows as ``Trainer``."""
    html = ROLE.sub(lambda role: f"<code>{role[2].rpartition('.')[2] if role[1] else role[2]}</code>", html)
    html = html.replace("<p>::</p>", "").replace("::</p>", ":</p>")
    html = OPTION.sub(r'<code class="option">\1</code>', html)
    html = CELL.sub(lambda cell: cell[0].replace(r"\|", "|"), html)
    if page.url.startswith(REFERENCE):
        up = "../" * page.url.count("/")
        html = PAGE.sub(lambda name: f'<a href="{up}{name[1]}/">{name[0]}</a>', html)
    return html
