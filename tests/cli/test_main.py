"""The command line as a whole: help, version, unknown names, and how a command ends."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from dalsegno.cli import COMMANDS, _parser, demo, main
from dalsegno.cli.console import print_facts

GOLDEN = Path(__file__).parents[1] / "golden" / "logs"
HEAVY = ("torch", "numpy", "safetensors", "matplotlib", "multiprocessing", "dataclasses")


def test_a_command_runs_without_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["callbacks", "list"]) == 0


def test_help_and_version_import_nothing_heavy() -> None:
    ask = (
        "import sys, dalsegno.cli\ntry: dalsegno.cli.main([sys.argv[1]])\nexcept SystemExit: pass\nprint(*sys.modules)"
    )
    for word in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", ask, word], capture_output=True, text=True, check=True)
        assert not set(HEAVY) & set(done.stdout.split()), word


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        ([], {"demo", "train", "launch", "check_resume"}),  # and groups, without their commands
        (["callbacks"], set()),  # a group in one file, and no other
    ],
)
def test_help_imports_only_the_commands_that_it_lists(words: list[str], listed: set[str]) -> None:
    ask = (
        "import sys, dalsegno.cli\ntry: dalsegno.cli.main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "one = lambda name: isinstance(getattr(sys.modules[name], name.split('.')[-1], None), dalsegno.cli.Command)\n"
        "print(*filter(one, list(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", ask, *words, "--help"], capture_output=True, text=True, check=True)
    assert set(done.stderr.split()) == {f"dalsegno.cli.{name}" for name in listed}


def test_the_help_of_a_group_begins_as_the_list_of_commands_says() -> None:
    groups = {name: first for name, first in COMMANDS.items() if first is not None}
    for name, first in groups.items():
        assert (importlib.import_module(f"dalsegno.cli.{name}").__doc__ or "").splitlines()[0] == first


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


@pytest.mark.parametrize(
    ("words", "listed"), [([], "check-resume"), (["logs"], "compare"), (["jobs"], "list"), (["diloco"], "serve")]
)
def test_a_group_alone_lists_its_commands(words: list[str], listed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert f"\n    {listed} " in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["demo", "--stepps", "3"], ["demo", "--steps", "x"], ["check-resume"]])
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "usage: dalsegno" in capsys.readouterr().err


def test_an_interrupt_is_one_line_and_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "demo", demo.demo._replace(run=interrupt))
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "\ndalsegno: interrupted\n"


@pytest.mark.parametrize("words", ["demo", "--help", "callbacks list", "logs export {} --to csv", "logs tail {}"])
def test_a_reader_that_goes_away_is_no_difference(words: str, tmp_path: Path) -> None:
    """Exit status 1 means that something differs, and nothing else does."""
    code = "import sys; from dalsegno.cli import main; sys.stdin.read(); sys.exit(main(sys.argv[1:]))"
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words.format(GOLDEN / "killed").split()],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    assert child.stdout is not None
    child.stdout.close()
    _, complaint = child.communicate(b"")
    assert (child.returncode, complaint) == (141, b"")


def test_another_broken_pipe_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: object) -> int:
        raise BrokenPipeError("of a data worker")

    monkeypatch.setattr(demo, "demo", demo.demo._replace(run=fail))
    with pytest.raises(BrokenPipeError, match="of a data worker"):
        main(["demo"])


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """All commands' parsers, without those of groups."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for group in groups:
        for command in group.choices.values():
            yield from commands(command)
    if not groups:
        yield parser


def test_every_command_names_its_exit_statuses() -> None:
    for command in commands(_parser(None)):
        last = " ".join(command.format_help().split("\n\n")[-1].split())
        assert last.startswith("Exit status: 0 ") and "; 2 " in last and "; 130 " in last, command.prog
        assert command.format_help().count("xit status: ") == 1, command.prog


def test_a_group_names_where_exit_statuses_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["logs", "--help"])
    assert "'dalsegno logs COMMAND --help' has a command's options and exit statuses." in capsys.readouterr().out


def test_every_command_but_those_that_run_on_prints_json() -> None:
    without = {each.prog for each in commands(_parser(None)) if "--json" not in each.format_help()}
    assert without == {
        f"dalsegno {name}" for name in ("demo", "train", "launch", "diloco serve", "diloco worker", "jobs open")
    }


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("value", "colours"), [(None, True), ("", True), ("1", False)])
def test_colours_unless_no_color_is_set_and_not_empty(
    value: str | None, colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv("NO_COLOR", value)
    terminal = Terminal()
    print_facts("runs/a", [("steps", "12")], terminal)
    assert ("\x1b[" in terminal.getvalue()) is colours


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["ch"], {"check-resume", "checkpoints"}),
        (["logs", "sh"], {"show"}),
        (["logs", "show", "--whe"], {"--where"}),
        (["logs", "show", "--kind", "ev"], {"eval"}),
        (["logs", "compare", "first", "sec"], {"second"}),
    ],
)
def test_bash_completes_commands_options_choices_and_files(
    words: list[str], completed: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    with pytest.raises(SystemExit) as end:
        main(["--print-completion", "bash"])
    assert end.value.code == 0
    for name in ("first", "second"):
        (tmp_path / name).touch()
    (tmp_path / "completion.bash").write_text(capsys.readouterr().out)
    # What bash does when Tab is pressed: sets these variables, calls the function that `complete` has registered.
    press_tab = (
        "source ./completion.bash; "
        "function=$(complete -p dalsegno); function=${function##*-F }; function=${function%% *}; "
        'COMP_WORDS=(dalsegno "$@"); COMP_CWORD=$#; $function; printf "%s\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        [bash, "--norc", "-c", press_tab, "bash", *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert {word.strip() for word in done.stdout.split()} == completed


def test_completion_of_an_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", "bsh"]) == 2
    assert "unknown shell 'bsh'; did you mean 'bash'?" in capsys.readouterr().err
