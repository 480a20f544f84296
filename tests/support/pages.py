"""Runs a page: its blocks of code in order, in a folder, and compares what commands print with what the page shows.

- A block with a file's title is that file. One of docs/examples must have the lines that the page shows.
- Other blocks of Python run one after another in one process's variables.
- A console's commands run; the lines below a command must be among those that it prints, in this order. ``…`` stands
  for any text, and a decimal number for one that differs by up to two percent.

Programs run in this process, or in forked ranks, because the import of torch would take longer than all else. Programs
of docs/examples, and those on several ranks, stop after a few steps: other tests train them to their end.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import runpy
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import dalsegno as ds
from dalsegno.cli import main
from dalsegno.testing import FaultPlan
from dalsegno.testing.processes import start_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = "docs/examples/"

_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)
_VARIABLE = re.compile(r"(…|\d+\.\d+(?:e[-+]?\d+)?)")
_NUMBER = r"([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)"

NEGATIVE: Final = 1
"""Exit status of a command whose answer is negative, such as that runs differ."""
INTERRUPT: Final = "^C"
FEW: Final = 5
"""Steps of the programs of docs/examples, and of those on several ranks."""
INTERRUPTED: Final = 130
"""Steps of a process until Ctrl-C is pressed or it is killed."""


def run_page(page: Path) -> None:
    """Run a page in the current folder, in which docs/examples can be found as in a clone."""
    Path("docs").mkdir(exist_ok=True)
    if not Path(EXAMPLES).exists():
        Path(EXAMPLES.rstrip("/")).symlink_to(ROOT / EXAMPLES)
    variables: dict[str, Any] = {}
    for language, title, code in _FENCE.findall(page.read_text(encoding="utf-8")):
        if title.startswith(EXAMPLES):
            _check_excerpt(title, code)
        elif title:
            Path(title).write_text(code, encoding="utf-8")
        elif language == "python":
            exec(compile(code, str(page), "exec"), variables)  # our own page
        else:
            assert language == "console", f"{page.name}: a block in {language} needs a title"
            for command, shown in _commands(code):
                _check_shown(command, shown, _run(command, shown))


def write_files(page: Path) -> None:
    """Write the files that a page's titles name, without running anything."""
    for _, title, code in _FENCE.findall(page.read_text(encoding="utf-8")):
        if title and not title.startswith(EXAMPLES):
            Path(title).write_text(code, encoding="utf-8")


def _check_excerpt(name: str, code: str) -> None:
    program = [line.strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines()]
    missing = [line for line in code.splitlines() if line.strip() not in program]
    assert missing == [], f"not in {name}"


def _commands(block: str) -> Iterator[tuple[str, list[str]]]:
    """Each command, without its comment, and the lines below it."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield command.partition("  #")[0].strip(), [line for line in shown if line.strip()]


def _run(command: str, shown: list[str]) -> str:
    """What the command prints. If ``^C`` is shown, Ctrl-C is pressed during the training."""
    words = shlex.split(command)
    if command.endswith("&"):  # killed by the next command
        (outcome,) = start_ranks(_killed, 1, words[1:-1]).wait()
        assert outcome.was_killed, outcome.error
        return ""
    if words[0] == "kill":
        return ""
    if words[0] == "sbatch":
        assert (ROOT / words[1]).read_text(encoding="utf-8").startswith("#!"), command
        return ""
    if words[:2] == ["pip", "install"]:
        return ""
    if words[0] == "torchrun" or words[:2] == ["dalsegno", "launch"]:
        first = next(index for index, word in enumerate(words) if word.endswith(".py"))
        outcomes = start_ranks(_program, int(words[first - 1]), words[first:], True).wait()
        assert [outcome.exit_code for outcome in outcomes] == [0] * len(outcomes), outcomes
        return ""
    printed = io.StringIO()
    interrupted = INTERRUPT in shown
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        if words[0] == "python":
            few = words[1].startswith(EXAMPLES)
            _program(words[1:], few, signal.SIGINT if interrupted else None)
        else:
            assert words[0] == "dalsegno", command
            status = main([word for word in words[1:] if word != "-f"])  # -f has no end
            assert status in (0, NEGATIVE), f"{command}: {status}\n{printed.getvalue()}"
    return printed.getvalue()


def _program(words: Sequence[str], few: bool, sends: signal.Signals | None = None) -> None:
    """``python WORDS``, for a few steps or with a signal at its 130th."""
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, sys, "argv", sys.argv)
        stack.callback(sys.path.__setitem__, slice(None), list(sys.path))
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).parent.resolve()))
        if sends is not None:
            stack.callback(FaultPlan(event=ds.Event.STEP_END, count=INTERRUPTED, sends=sends).arm())
        if few:
            stack.enter_context(few_steps())
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as ended:
            assert ended.code in (0, None), f"{words}: {ended.code}"


@contextlib.contextmanager
def few_steps() -> Iterator[None]:
    """Trainings stop after :data:`FEW` steps."""
    handle = ds.register_global_callback(ds.on(ds.Event.STEP_END, _stop))
    try:
        yield
    finally:
        handle.remove()


def _killed(words: Sequence[str]) -> None:
    _program(words, False, signal.SIGKILL)


def _stop(ctx: Any) -> None:
    if ctx.state.global_step >= FEW:
        ctx.control.should_training_stop = True


def _check_shown(command: str, shown: list[str], printed: str) -> None:
    lines = iter(printed.splitlines())
    for line in (line for line in shown if line != INTERRUPT):
        assert any(_is_like(line, each) for each in lines), f"$ {command}\ndoes not print:\n{line}\nbut:\n{printed}"


def _is_like(shown: str, printed: str) -> bool:
    """Whether a printed line is the one shown, but for spaces, ``…`` and the last digits of decimal numbers."""
    shown, printed = " ".join(shown.split()), " ".join(printed.split())
    parts = _VARIABLE.split(shown)
    numbers = [float(part) for part in parts[1::2] if part != "…"]
    pattern = "".join(
        re.escape(part) if index % 2 == 0 else ".*" if part == "…" else _NUMBER for index, part in enumerate(parts)
    )
    found = re.fullmatch(pattern, printed)
    return found is not None and all(
        math.isclose(float(number), expected, rel_tol=0.02)
        for number, expected in zip(found.groups(), numbers, strict=True)
    )


def forget_modules_of(folder: Path) -> None:
    """Modules imported from the folder are imported anew by the next page."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(f"{folder}{os.sep}"):
            del sys.modules[name]
