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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dalsegno.testing import Trial

    from .import_factory import Factory

EXIT_STATUSES = {
    0: "nothing differs",
    1: "something differs (the output names the first differing record or tensor)",
    2: "the check could not run",
}


def describe(parser: argparse.ArgumentParser) -> None:
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
        say = partial(print, flush=True, file=sys.stderr if arguments.json else sys.stdout)
        return check(arguments, factory, folder, say)


def _check(arguments: argparse.Namespace, factory: Factory, folder: Path, say: Callable[[str], None]) -> int:
    from dataclasses import asdict

    from dalsegno.cli.tables import print_json
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
    if arguments.json:
        rows = [{**asdict(row), "identical": row.identical} for row in comparison.rows]
        print_json({"identical": comparison.identical, "rows": rows})
    else:
        print(f"\n{comparison.table()}\n\n{'Nothing differs.' if comparison.identical else 'THE RUNS DIFFER.'}")
    return 0 if comparison.identical else 1


def _check_thoroughly(arguments: argparse.Namespace, factory: Factory, folder: Path, say: Callable[[str], None]) -> int:
    from dataclasses import asdict

    from dalsegno.cli.tables import print_json
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
    if arguments.json:
        print_json([{**asdict(trial), "comparison": None} for trial in trials])
    else:
        print(_as_text(trials))
    return 0 if {trial.verdict for trial in trials} <= {Verdict.EXACT, Verdict.REFUSED} else 1


def _check_empty(keep: Path) -> None:
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ConfigurationError(f"--keep {keep}: not an empty directory; name another one")


def _as_text(trials: Sequence[Trial]) -> str:
    """A line per interruption, followed by the message or difference if it is not exact."""
    lines = [""]
    for trial in trials:
        ranks = f"{trial.world_size} rank{'s' * (trial.world_size > 1)}"
        lines += [f"{trial.verdict:<10} {ranks:<8} {place}" for place in trial.breaks or ("from the beginning",)]
        if trial.words:
            lines.append(f"           {trial.words}")
    exact = all(trial.verdict == "exact" for trial in trials)
    return "\n".join([*lines, "", "Nothing differs." if exact else "NOT EVERYTHING IS EXACT."])
