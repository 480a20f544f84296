"""Kill your own training run, resume it, and compare it with an uninterrupted one.

FACTORY is "module:function"; the module is searched in the current directory first. The function takes an output
directory (a pathlib.Path) and returns your trainer, built the same way each time:

    def build(output_dir):
        return dalsegno.Trainer(model, dalsegno.TrainingArguments(output_dir=output_dir, ...), ...)

With --thorough the run is interrupted in the middle and at the end of each of its first four epochs, by SIGKILL and by
SIGTERM, on one rank and on two; build a run of at least four epochs, as small as possible. Each interruption is exact
(nothing differs), refused (an error before the first step), said (a warning before the first step) or different.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dalsegno.testing import RunComparison, Trial

    from .import_factory import Factory

EXIT_STATUSES = {
    0: "nothing differs",
    1: "something differs (the output names the first differing record or tensor)",
    2: "the check could not run",
}


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "factory", metavar="FACTORY", help="function that builds the trainer, as module:function, say my_run:build"
    )
    parser.add_argument(
        "--kill-at",
        metavar="SPEC",
        action="append",
        default=[],
        help="where to kill a leg: on_step_end:12 (12th time of an event), write:3 (before the 3rd write of a file), "
        "write:3:logs (only paths that contain 'logs') or 2.5s (seconds after the start); may be repeated, one kill "
        "each; default: two at random",
    )
    parser.add_argument(
        "--thorough", action="store_true", help="interrupt the run twice in each of its first four epochs"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the random kills; default: %(default)s"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="number of ranks, joined over gloo; default: 1, with --thorough 1 and then 2",
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="time limit of each leg; default: %(default)g"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the runs and their output in DIR; default: deleted afterwards"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, the progress on stderr")


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        ConfigurationError: for an invalid factory, kill or directory; UnknownName suggests the nearest name.
        RankFailed: if a leg raises.
    """
    if arguments.ranks is not None and arguments.ranks < 1:
        raise ConfigurationError(f"--ranks {arguments.ranks}: needs at least 1")
    if arguments.thorough and arguments.kill_at:
        raise ConfigurationError("--thorough chooses the interruptions itself; leave out --kill-at")
    if arguments.keep is not None:
        _check_empty(arguments.keep)
    sys.path.insert(0, str(Path.cwd()))  # the processes of the legs inherit it

    import tempfile

    from .import_factory import Factory

    factory = Factory.named(arguments.factory)
    with tempfile.TemporaryDirectory(prefix="dalsegno-check-resume-") as temporary:
        folder = arguments.keep or Path(temporary)
        check = _check_thoroughly if arguments.thorough else _check
        return check(arguments, factory, folder, _to_stderr if arguments.json else _to_stdout)


def _check(arguments: argparse.Namespace, factory: Factory, folder: Path, say: Callable[[str], None]) -> int:
    from dalsegno.testing import check_resume

    from .fault_spec import fault_plan

    comparison = check_resume(
        factory,
        [fault_plan(spec) for spec in arguments.kill_at] or None,
        folder=folder,
        world_size=arguments.ranks or 1,
        timeout=arguments.timeout,
        seed=arguments.seed,
        say=say,
    )
    _to_stdout(_as_json(comparison) if arguments.json else _as_text(comparison))
    return 0 if comparison.identical else 1


def _check_thoroughly(arguments: argparse.Namespace, factory: Factory, folder: Path, say: Callable[[str], None]) -> int:
    from dalsegno.testing import Verdict, check_resume_thoroughly

    trials = check_resume_thoroughly(
        factory,
        folder=folder,
        world_sizes=[arguments.ranks] if arguments.ranks else [1, 2],
        timeout=arguments.timeout,
        say=say,
    )
    if not any(trial.breaks for trial in trials):
        raise ConfigurationError(trials[0].words if trials else "the run is too short to be interrupted anywhere")
    _to_stdout(_trials_as_json(trials) if arguments.json else _trials_as_text(trials))
    return 1 if {trial.verdict for trial in trials} & {Verdict.DIFFERENT, Verdict.SAID} else 0


def _check_empty(keep: Path) -> None:
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ConfigurationError(f"--keep {keep}: not an empty directory; name another one")


def _as_text(comparison: RunComparison) -> str:
    verdict = "Nothing differs." if comparison.identical else "THE RUNS DIFFER."
    return f"\n{comparison.table()}\n\n{verdict}"


def _as_json(comparison: RunComparison) -> str:
    import json
    from dataclasses import asdict

    rows = [{**asdict(row), "identical": row.identical} for row in comparison.rows]
    return json.dumps({"identical": comparison.identical, "rows": rows}, indent=2)


def _trials_as_text(trials: Sequence[Trial]) -> str:
    """A line per interruption, followed by the message or difference if it is not exact."""
    lines = [""]
    for trial in trials:
        ranks = f"{trial.world_size} rank{'s' * (trial.world_size > 1)}"
        lines += [f"{trial.verdict:<10} {ranks:<8} {place}" for place in trial.breaks or ("from the beginning",)]
        if trial.words:
            lines.append(f"           {trial.words}")
    exact = all(trial.verdict == "exact" for trial in trials)
    return "\n".join([*lines, "", "Nothing differs." if exact else "NOT EVERYTHING IS EXACT."])


def _trials_as_json(trials: Sequence[Trial]) -> str:
    import json
    from dataclasses import asdict

    return json.dumps([{**asdict(trial), "comparison": None} for trial in trials], indent=2)


def _to_stdout(line: str) -> None:
    print(line, flush=True)


def _to_stderr(line: str) -> None:
    print(line, flush=True, file=sys.stderr)
