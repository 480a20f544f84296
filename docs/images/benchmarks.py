"""Puts the benchmarks' results into two pages: ``python docs/images/benchmarks.py [FILE…]``.

Each FILE is what ``python -m benchmarks --json FILE`` has written, of all benchmarks or of some: their results replace
those in docs/reference/benchmarks.json, the others stay. Without a FILE, that file is read again. Writes the table of
docs/reference/benchmarks.md, the chosen rows of docs/why/performance.md, and ``benchmarks.svg``, a picture of all rows
that have a target. A test compares all three with the file.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "reference" / "benchmarks.json"
PAGE = HERE.parent / "reference" / "benchmarks.md"
CHOSEN_PAGE = HERE.parent / "why" / "performance.md"
PICTURE = HERE / "benchmarks.svg"

BEGIN, END = "<!-- made by docs/images/benchmarks.py -->\n", "<!-- end -->\n"
COLUMNS = ("what", "ours", "peer", "ratio", "spread", "target", "met?")

CHOSEN = (
    ("a step of the loop; Trainer, defaults and JsonLogger", "bare PyTorch loop"),
    ("a step of the loop; for reference: HF Trainer", "bare PyTorch loop"),
    ("a step of the loop; for reference: Lightning", "bare PyTorch loop"),
    ("event without handlers", "HF Trainer"),
    ("100 steps with 34 observers at once, 9.7 M parameters", "without any"),
    ("training stands still in a background save, 512 MB", "one warm memcpy"),
    ("durable save in the background, 2 GB in 8 MB tensors, one rank", "the disk's direct limit"),
    ("durable save in the background, 2 GB in 8 MB tensors, one rank", "torch.save, no fsync"),
    ("verified load of 512 MB, warm", "dcp.load, nothing verified"),
    ("resume a shuffled dataset of 10 M rows to its first batch", "StatefulDataLoader"),
    ("from SIGKILL of one of two ranks to the next step", "torchrun"),
    ("open a log of 1 M records, 170 MB, to a frame", "polars.read_ndjson"),
)
"""Rows of the short page: what is measured, and how its peer begins."""

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


def picture(rows: list[dict[str, Any]]) -> str:
    """A dot for each row that has a ratio and a target for it: the ratio over the target, with its spread."""
    drawn = [(row, share) for row in rows if (share := _share_of_target(row)) is not None]
    height = TOP + ROW * len(drawn) + 16
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' {FONT} font-size='11'>",
        f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>",
        f"<text x='{LEFT}' y='16' fill='{INK}' font-size='13'>ratio over its target: left of 1 is met</text>",
    ]
    for share in (0.1, 0.25, 0.5, 1.0, 2.0, 4.0):
        x, colour = _x(share), INK if share == 1 else LINE
        parts.append(f"<line x1='{x}' y1='{TOP - 8}' x2='{x}' y2='{height - 12}' stroke='{colour}'/>")
        parts.append(f"<text x='{x}' y='{TOP - 12}' fill='{GREY}' text-anchor='middle'>{share:g}</text>")
    for number, (row, share) in enumerate(drawn):
        y, colour = TOP + ROW * number + 6, MET if row["met"] else MISSED
        spread = row.get("spread") or 0.0
        parts.append(f"<text x='{LEFT - 14}' y='{y + 4}' fill='{INK}' text-anchor='end'>{escape(_label(row))}</text>")
        if spread:
            ends = [_x(share * (1 + sign * spread)) for sign in (-1, 1)]
            parts.append(f"<line x1='{ends[0]}' y1='{y}' x2='{ends[1]}' y2='{y}' stroke='{colour}' stroke-width='2'/>")
        parts.append(f"<circle cx='{_x(share)}' cy='{y}' r='4' fill='{colour}'/>")
        parts.append(f"<text x='{WIDTH - 6}' y='{y + 4}' fill='{GREY}' text-anchor='end'>{escape(row['ratio'])}</text>")
    return "\n".join([*parts, "</svg>", ""])


def page(text: str, results: dict[str, Any]) -> str:
    """The page ``text`` with the table of ``results``."""
    return _put(text, f"\n{_sources(results)}\n\n{table(rows_of(results))}\n")


def chosen_page(text: str, results: dict[str, Any]) -> str:
    """The short page ``text`` with the chosen rows of ``results``.

    Raises:
        KeyError: if there is no such row.
    """
    rows = rows_of(results)
    chosen = [row for what, peer in CHOSEN for row in rows if row["what"] == what and row["peer"].startswith(peer)]
    if len(chosen) != len(CHOSEN):
        raise KeyError(f"{len(CHOSEN)} rows are chosen, of which the results have {len(chosen)}")
    return _put(text, table(chosen))


def _put(text: str, content: str) -> str:
    """The page with ``content`` between its two comments.

    Raises:
        ValueError: if the page does not have the two comments, each once.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise ValueError(f"the lines {BEGIN.strip()!r} and {END.strip()!r} must be around the table, each once")
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    return f"{before}{BEGIN}{content}{after}"


def rows_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of all benchmarks."""
    return [row for measured in results.values() for row in measured["rows"]]


def merged(files: Iterable[Path]) -> dict[str, Any]:
    """The results of all files, by name of the benchmark; a later file's replace an earlier one's.

    Raises:
        ValueError: if a file does not contain results.
    """
    results: dict[str, Any] = {}
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        if "benchmarks" not in content:
            raise ValueError(f"{file} does not contain results; write it with python -m benchmarks --json {file}")
        results |= content["benchmarks"]
    return results


def _sources(results: dict[str, Any]) -> str:
    """A sentence for each combination of machine and versions, with its benchmarks if there are several."""
    groups: dict[str, list[str]] = {}
    for name, measured in results.items():
        groups.setdefault(_source(measured), []).append(name)
    busy = [name for name, measured in results.items() if _is_busy(measured["machine"])]
    sentences = [f"Measured {source}{_named(names) if len(groups) > 1 else ''}." for source, names in groups.items()]
    return "\n\n".join([*sentences, *([f"Beside other work on the machine{_named(busy)}."] if busy else [])])


def _named(benchmarks: list[str]) -> str:
    return f": {', '.join(f'`{name}`' for name in benchmarks)}"


def _is_busy(machine: dict[str, Any]) -> bool:
    """Whether more threads than cores were running in the minute before."""
    return float(machine.get("load", 0)) > machine["cores"]


def _source(measured: dict[str, Any]) -> str:
    machine = measured["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in measured["versions"].items())
    return f"{_day(measured['timestamp'])}on {machine['processor']}, {machine['cores']} cores, with {versions}"


def _day(timestamp: float | None) -> str:
    """None: it was not recorded."""
    return "" if timestamp is None else time.strftime("on %Y-%m-%d, ", time.gmtime(timestamp))


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
    results = merged([RESULTS, *map(Path, sys.argv[1:])])
    text = page(PAGE.read_text(encoding="utf-8"), results)
    chosen = chosen_page(CHOSEN_PAGE.read_text(encoding="utf-8"), results)
    RESULTS.write_text(f"{json.dumps({'benchmarks': results}, indent=2, ensure_ascii=False)}\n", encoding="utf-8")
    PICTURE.write_text(picture(rows_of(results)), encoding="utf-8")
    PAGE.write_text(text, encoding="utf-8")
    CHOSEN_PAGE.write_text(chosen, encoding="utf-8")


if __name__ == "__main__":
    main()
