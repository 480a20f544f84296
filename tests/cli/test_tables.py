"""Tables on a terminal: how they fit, and what in them cannot steer it."""

from __future__ import annotations

import io
import re

import pytest

from dalsegno.cli.console import Column, fitted, number, print_facts, print_table, visible


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


COLUMNS = [Column("run", "run"), *(Column(name, name, number, right=True) for name in ("steps", "loss", "best"))]
ROWS = [{"run": "a run with a name of eight words", "steps": 1_234_567, "loss": 8.1872e10, "best": 0.18661}]


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
@pytest.mark.parametrize("width", [20, 45, 200])
def test_numbers_stay_whole_however_narrow_the_terminal_is(
    width: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setenv("COLUMNS", str(width))
    terminal = Terminal()
    print_table(COLUMNS, ROWS, terminal)
    header, *lines = re.sub(r"\x1b\[\d+m", "", terminal.getvalue()).splitlines()
    assert header.split() == ["run", "steps", "loss", "best"]
    assert re.search(r"1,234,567 +8\.1872e\+10 +0\.18661", lines[0])
    assert len(lines) == {20: 3, 45: 3, 200: 1}[width]


def test_what_stands_in_a_log_does_not_steer_the_terminal() -> None:
    assert visible("größe – 1") == "größe – 1"
    assert visible("\x1b[31mred\n") == r"\x1b[31mred\n"
    terminal = Terminal()
    print_table([Column("run", "run")], [{"run": "\x1b]0;title\x07"}], terminal)
    assert r"\x1b]0;title\x07" in terminal.getvalue()


@pytest.mark.parametrize("width", [1, 6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 40])
def test_words_are_left_out_and_never_numbers_cut_in_two(width: int) -> None:
    words = "step 3  loss 180.91"
    shown = fitted(words, width)
    assert len(shown) <= width
    kept = shown.removesuffix("…").rstrip()
    assert (shown == words) == (width >= len(words))
    assert kept in (words, "step 3") or width < len("step 3 …")
    assert fitted(words, None) == words


def test_facts_are_wrapped_on_a_terminal_and_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    facts = [("loss", "2.3932 at step 300, best 2.2844 at step 258"), ("state", "died")]
    terminal, file = Terminal(), io.StringIO()
    print_facts("run", facts, terminal)
    print_facts("run", facts, file)
    assert terminal.getvalue().splitlines()[1:] == [
        "  loss   2.3932 at step 300, best 2.2844",
        "         at step 258",
        "  state  died",
    ]
    assert file.getvalue().splitlines()[1] == "  loss   2.3932 at step 300, best 2.2844 at step 258"
