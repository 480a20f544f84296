"""Puts the benchmarks' results into docs/performance.md: ``python docs/images/benchmarks.py [FILE]``.

FILE is what ``python -m benchmarks --json FILE`` has written; it becomes docs/benchmarks.json. Without it, that file is
read again. Writes the page's table and ``benchmarks.svg``, a picture of all rows that have a target. A test compares
both with the file.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks.json"
PAGE = HERE.parent / "performance.md"
PICTURE = HERE / "benchmarks.svg"

BEGIN, END = "<!-- made by docs/images/benchmarks.py -->\n", "<!-- end -->\n"
COLUMNS = ("what", "ours", "peer", "ratio", "spread", "target", "met?")

FONT = "font-family='-apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif'"
INK, GREY, LINE, MET, MISSED = "#1f2328", "#59636e", "#d1d9e0", "#1a7f37", "#cf222e"
LEFT, WIDTH, ROW, TOP = 560, 960, 20, 44
LOWEST, HIGHEST = 0.02, 4.0
"""Ends of the axis, in multiples of the target."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    cells = [
        [row[name] for name in ("what", "ours", "peer", "ratio")] + [_spread(row), row["target"], _met(row)]
        for row in rows
    ]
    lines = [COLUMNS, ["---"] * len(COLUMNS), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def picture(result: dict[str, Any]) -> str:
    """A dot for each row that has a ratio and a target for it: the ratio over the target, with its spread."""
    rows = [(row, share) for row in result["rows"] if (share := _share_of_target(row)) is not None]
    height = TOP + ROW * len(rows) + 16
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' {FONT} font-size='11'>",
        f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>",
        f"<text x='{LEFT}' y='16' fill='{INK}' font-size='13'>ratio over its target: left of 1 is met</text>",
    ]
    for share in (0.1, 0.25, 0.5, 1.0, 2.0, 4.0):
        x, colour = _x(share), INK if share == 1 else LINE
        parts.append(f"<line x1='{x}' y1='{TOP - 8}' x2='{x}' y2='{height - 12}' stroke='{colour}'/>")
        parts.append(f"<text x='{x}' y='{TOP - 12}' fill='{GREY}' text-anchor='middle'>{share:g}</text>")
    for number, (row, share) in enumerate(rows):
        y, colour = TOP + ROW * number + 6, MET if row["met"] else MISSED
        spread = row.get("spread") or 0.0
        parts.append(f"<text x='{LEFT - 14}' y='{y + 4}' fill='{INK}' text-anchor='end'>{escape(_label(row))}</text>")
        if spread:
            ends = [_x(share * (1 + sign * spread)) for sign in (-1, 1)]
            parts.append(f"<line x1='{ends[0]}' y1='{y}' x2='{ends[1]}' y2='{y}' stroke='{colour}' stroke-width='2'/>")
        parts.append(f"<circle cx='{_x(share)}' cy='{y}' r='4' fill='{colour}'/>")
        parts.append(f"<text x='{WIDTH - 6}' y='{y + 4}' fill='{GREY}' text-anchor='end'>{escape(row['ratio'])}</text>")
    return "\n".join([*parts, "</svg>", ""])


def page(text: str, result: dict[str, Any]) -> str:
    """The page ``text`` with the table of ``result``."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{_source(result)}\n\n{table(result['rows'])}\n{END}{after}"


def _source(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"Measured on {machine['processor']}, {machine['cores']} cores, with {named}."


def _share_of_target(row: dict[str, Any]) -> float | None:
    """The ratio over its target; None without a ratio, or where the target is not one of the ratio."""
    is_of_ratio = "×" in row["target"] or "its time" in row["ratio"]
    ratio, target = _NUMBER.match(row["ratio"]), _NUMBER.search(row["target"])
    if row["met"] is None or not is_of_ratio or ratio is None or target is None:
        return None
    return float(ratio[0]) / float(target[0])


def _x(share: float) -> float:
    """Place on the axis, which is logarithmic."""
    clipped = min(max(share, LOWEST), HIGHEST)
    return round(LEFT + (WIDTH - 90 - LEFT) * math.log(clipped / LOWEST) / math.log(HIGHEST / LOWEST), 1)


def _label(row: dict[str, Any]) -> str:
    label = f"{row['what']} · {row['peer'].partition(':')[0]}"
    return label if len(label) <= 100 else f"{label[:99]}…"


def _spread(row: dict[str, Any]) -> str:
    return "" if row.get("spread") is None else f"± {100 * row['spread']:.0f} %"


def _met(row: dict[str, Any]) -> str:
    return {True: "yes", False: "NO", None: ""}[row["met"]]


def main() -> None:
    if len(sys.argv) > 1:
        shutil.copyfile(sys.argv[1], RESULTS)
    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    PICTURE.write_text(picture(result), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")


if __name__ == "__main__":
    main()
