"""Records ``dalsegno demo`` as an animation: ``python docs/images/demo.py``. A test checks it against the program.

The program runs in a pseudo-terminal, and every change of its screen is recorded with its time. ``demo-cast.svg`` shows
the screen line by line, with long waits shortened. CSS animates it, without a script, so that a README can show it.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
STEPS = 300
COLUMNS, ROWS = 100, 40
SECONDS = 24.0
"""Length of the animation, without the final screen."""
FINAL = 6.0
"""Seconds for which the final screen stays."""
LONGEST_WAIT = 0.6
"""Longest time, in recorded seconds, for which nothing changes; longer ones are cut."""
WIDTH, HEIGHT, FONT_SIZE = 8.0, 18, 13
"""Of a character and of a line, in pixels."""
CONTROL = re.compile(r"\r|\n|\x1b\[K|\x1b\[[0-9;?]*[A-Za-z]|[^\r\n\x1b]+")


class Line(NamedTuple):
    """A line of the screen, and the time during which it shows this text."""

    row: int
    text: str
    begin: float
    end: float
    """Infinity: until the end."""


def record(command: list[str], folder: Path) -> Iterator[tuple[float, str]]:
    """Run a command in a terminal; yields what it writes, with the time in seconds since it began."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    began = time.monotonic()
    with subprocess.Popen(command, cwd=folder, stdout=terminal, stderr=terminal, stdin=subprocess.DEVNULL) as running:
        os.close(terminal)
        while True:
            try:
                written = os.read(screen, 65536)
            except OSError:  # how Linux reports the end of a terminal
                break
            if not written:
                break
            yield time.monotonic() - began, written.decode(errors="replace")
    os.close(screen)
    if running.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {running.returncode}")


def shorten(written: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """Cut long waits, and scale the times to :data:`SECONDS`."""
    shortened, now, before = [], 0.0, 0.0
    for at, text in written:
        now += min(at - before, LONGEST_WAIT)
        before = at
        shortened.append((now, text))
    return [(at * SECONDS / max(now, 1e-9), text) for at, text in shortened]


def lines(written: Iterable[tuple[float, str]]) -> list[Line]:
    """What each line of the screen shows, and when. Handles what the demo writes: text, ``\\r`` and erased lines."""
    done: list[Line] = []
    shown: dict[int, tuple[str, float]] = {}
    row, column = 0, 0
    for at, text in written:
        for piece in CONTROL.findall(text):
            if piece == "\n":
                row += 1
            elif piece == "\r":
                column = 0
            elif piece.startswith("\x1b") and piece != "\x1b[K":
                continue  # colours
            else:
                before, since = shown.get(row, ("", at))
                after = before[:column] if piece == "\x1b[K" else before[:column].ljust(column) + piece
                column = column if piece == "\x1b[K" else column + len(piece)
                if before and since < at and before != after:
                    done.append(Line(row, before, since, at))
                shown[row] = (after, since if after == before else at)
    return done + [Line(row, text, since, float("inf")) for row, (text, since) in shown.items() if text.strip()]


def draw(shown: list[Line]) -> str:
    """The animation as SVG."""
    total = SECONDS + FINAL
    width, height = COLUMNS * WIDTH + 32, (max(line.row for line in shown) + 1) * HEIGHT + 56
    rules, texts = [], []
    for number, line in enumerate(line for line in shown if line.text.strip()):
        begin, end = (round(100 * min(at, total) / total, 2) for at in (line.begin, line.end))
        stays = end >= 100
        steps = [f"0%,{begin}%{{opacity:0}}", f"{begin + 0.01:.2f}%,{end if stays else end - 0.01:.2f}%{{opacity:1}}"]
        rules.append(f"@keyframes k{number}{{{''.join(steps)}{'' if stays else f'{end}%,100%{{opacity:0}}'}}}")
        rules.append(f"#l{number}{{animation-name:k{number}{'' if stays else ';opacity:0'}}}")
        kind = next(
            (kind for kind, words in (("bad", "SIGKILL"), ("good", "Nothing differs")) if words in line.text), ""
        )
        marked = f' class="{kind}"' if kind else ""
        y = 52 + line.row * HEIGHT
        texts.append(f'<text id="l{number}"{marked} x="16" y="{y}" xml:space="preserve">{escape(line.text)}</text>')
    style = (
        f"text{{font:{FONT_SIZE}px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#e6edf3;white-space:pre;"
        f"animation-duration:{total:g}s;animation-iteration-count:infinite;animation-timing-function:step-end}}"
        ".bad{fill:#ff7b72}.good{fill:#7ee787}"
        "@media(prefers-reduced-motion:reduce){text{animation:none}}" + "".join(rules)
    )
    dots = "".join(
        f'<circle cx="{20 + 18 * place}" cy="18" r="5.5" fill="{colour}"/>'
        for place, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}" '
        'role="img" aria-label="dalsegno demo in a terminal: a run is killed twice, resumes, and nothing differs">'
        f"<style>{style}</style>"
        f'<rect width="{width:g}" height="{height}" rx="8" fill="#0d1117"/>{dots}{"".join(texts)}</svg>\n'
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dalsegno", "demo", "--steps", str(STEPS)]
        written = [(0.0, f"$ dalsegno demo --steps {STEPS}\r\n"), *record(command, Path(folder))]
        written = [(at, text.replace(f"{Path(folder).resolve()}/", "~/")) for at, text in written]
    (HERE / "demo-cast.svg").write_text(draw(lines(shorten(written))), encoding="utf-8")


if __name__ == "__main__":
    main()
