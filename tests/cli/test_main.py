"""The command line as a whole: help, version, names nobody knows, and how a command ends."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from dalsegno.cli import COMMANDS, demo, main

HEAVY = ("torch", "numpy", "safetensors", "matplotlib", "multiprocessing", "dataclasses")


def test_help_and_version_import_nothing_heavy() -> None:
    ask = (
        "import sys, dalsegno.cli\ntry: dalsegno.cli.main([sys.argv[1]])\nexcept SystemExit: pass\nprint(*sys.modules)"
    )
    for word in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", ask, word], capture_output=True, text=True, check=True)
        assert not set(HEAVY) & set(done.stdout.split()), word


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "usage: dalsegno" in text
    if words == ["--help"]:
        assert all(name in text for name in COMMANDS)


def test_version_by_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "dalsegno", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"dalsegno {version('dalsegno')}\n"


@pytest.mark.parametrize(("word", "nearest"), [("dmo", "demo"), ("checkresume", "check-resume")])
def test_the_nearest_command_is_named(word: str, nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == f"dalsegno: unknown command {word!r}; did you mean {nearest!r}?\n"


@pytest.mark.parametrize("words", [[], ["demo", "--stepps", "3"], ["demo", "--steps", "x"], ["check-resume"]])
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "usage: dalsegno" in capsys.readouterr().err


def test_an_interrupt_is_one_line_and_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "\ndalsegno: interrupted\n"


def test_a_reader_that_goes_away_is_no_difference(tmp_path: Path) -> None:
    """Exit status 1 means that something differs, and nothing else does."""
    code = "import sys; from dalsegno.cli import demo, main\ndemo.run = lambda _: print(flush=True)\n"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{code}sys.stdin.read(); sys.exit(main(['demo']))"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.close()
    _, complaint = child.communicate(b"")
    assert (child.returncode, complaint) == (2, b"")
