"""A leg's line, on a terminal and in a pipe."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from dalsegno.cli import console
from dalsegno.cli.console import LegLine, redirect_output
from dalsegno.testing import run_ranks


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_five_lines_for_a_whole_run() -> None:
    stream = io.StringIO()
    line = LegLine("leg 1", 100, stream)
    for step in range(101):
        line.advance(step, 2.0 if step >= 50 else None)
    line.end(["finished"])
    lines = stream.getvalue().splitlines()
    assert lines[0] == "leg 1  starts from scratch"
    assert [text[7:19] for text in lines[1:6]] == [f"step {step:>3}/100" for step in range(20, 101, 20)]
    assert ["loss 2.000" in text for text in lines[1:6]] == [False, False, True, True, True]
    assert lines[6:] == ["       finished"]


def test_a_resumed_leg_says_where_it_goes_on() -> None:
    stream = io.StringIO()
    line = LegLine("leg 2", 100, stream)
    line.advance(60, None)
    line.advance(61, None)
    assert stream.getvalue() == "leg 2  resumes from the checkpoint of step 60\n"


def test_a_terminal_gets_one_line_drawn_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "REDRAW", 0.0)
    stream = Terminal()
    line = LegLine("leg 2", 90, stream)
    for step in (30, 45, 60):
        line.advance(step, 1.5)
    line.end(["killed"])
    text = stream.getvalue()
    assert text.count("\n") == 3  # where it goes on, the bar, the end
    assert text.count("\r\x1b[K") == 4
    bar = text.split("\n")[1].rpartition("\r\x1b[K")[2]
    assert bar.startswith("       ··········━━━━━━━━━━            step 60/90  loss 1.500")


def print_into(path: Path) -> None:
    redirect_output(path)
    print("from Python")
    print("to stderr", file=sys.stderr)
    os.system("echo from elsewhere")


def test_what_a_process_prints_goes_to_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sub" / "console.txt"
    for _ in range(2):
        run_ranks(print_into, 1, path)
    assert sorted(path.read_text().splitlines()) == [
        *2 * ["from Python"],
        *2 * ["from elsewhere"],
        *2 * ["to stderr"],
    ]
    assert capfd.readouterr() == ("", "")
