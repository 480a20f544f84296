"""Kill your own training run, resume it, and compare it with an uninterrupted one.

FACTORY is "module:function"; the module is searched in the current directory first. The function takes an output
directory (a pathlib.Path) and returns your trainer, built the same way each time:

    def build(output_dir):
        return dalsegno.Trainer(model, dalsegno.TrainingArguments(output_dir=output_dir, ...), ...)

A loop of your own is checked as a class: its instances, made with an output directory, train in a method train().

A configuration of 'dalsegno train' is checked too, in directories of its own: dalsegno check-resume run.toml

With --thorough the run is interrupted in the middle and at the end of each of its first four epochs, by SIGKILL and by
SIGTERM, on one rank and on two; build a run of at least four epochs, as small as possible. Each interruption is exact
(nothing differs), refused (an error before the first step), said (the difference is reported), not proven (no step is
repeated that could show it) or different.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from dalsegno import config
from dalsegno.cli.command import argument, command, flag, option
from dalsegno.errors import ConfigurationError, expect_known

from .console import print_json, redirect_output

if TYPE_CHECKING:
    from dalsegno.testing import FaultPlan, Trial


@command(
    argument(
        "factory",
        metavar="FACTORY|CONFIG",
        help="function that builds the trainer, as module:function, say my_run:build; or a configuration, say run.toml",
    ),
    argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override a value of the configuration, such as args.max_steps=60; may be repeated",
    ),
    argument(
        "--kill-at",
        metavar="SPEC",
        action="append",
        default=[],
        help="where to kill a leg: on_step_end:12 (12th time of an event), write:3 (before the 3rd write of a file), "
        "write:3:logs (only paths that contain 'logs') or 2.5s (seconds after the start); may be repeated, one kill "
        "each; default: two at random",
    ),
    flag("--thorough", help="interrupt the run twice in each of its first four epochs"),
    option("--seed", metavar="N", default=0, help="seed of the random kills"),
    option("--ranks", metavar="N", help="number of ranks, joined over gloo; default: 1, with --thorough 1 and then 2"),
    option("--timeout", metavar="SECONDS", default=300.0, help="time limit of each leg"),
    option("--keep", metavar="DIR", help="keep the runs and their output in DIR; default: deleted afterwards"),
    flag("--json", help="print the result as JSON, the progress on stderr"),
    statuses={
        0: "nothing differs",
        1: "something differs (the output names the first differing record or tensor)",
        2: "the check could not run",
    },
    help=__doc__,
)
def check_resume(arguments: argparse.Namespace) -> int:
    if arguments.ranks is not None and arguments.ranks < 1:
        raise ConfigurationError(f"--ranks {arguments.ranks}: needs at least 1")
    if arguments.thorough and arguments.kill_at:
        raise ConfigurationError("--thorough chooses the interruptions itself; leave out --kill-at")
    keep: Path | None = arguments.keep
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ConfigurationError(f"--keep {keep}: not an empty directory; name another one")
    sys.path.insert(0, str(Path.cwd()))  # the processes of the legs inherit it

    import tempfile

    trains = Checked(arguments.factory, arguments.set)
    trains.find(Path("output_dir"))  # raises for a wrong name or value before anything starts
    with tempfile.TemporaryDirectory(prefix="dalsegno-check-resume-") as temporary:
        folder = keep or Path(temporary)
        check = _check_thoroughly if arguments.thorough else _check
        say = partial(print, flush=True, file=sys.stderr if arguments.json else sys.stdout)
        return check(arguments, trains, folder, say)


def _check(arguments: argparse.Namespace, trains: Checked, folder: Path, say: Callable[[str], None]) -> int:
    from dataclasses import asdict

    from dalsegno.testing import check_resume

    comparison = check_resume(
        trains,
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
        print(f"\n{comparison.table()}\n\n{_NOTHING if comparison.identical else 'THE RUNS DIFFER.'}")
    return 0 if comparison.identical else 1


def _check_thoroughly(arguments: argparse.Namespace, trains: Checked, folder: Path, say: Callable[[str], None]) -> int:
    from dataclasses import asdict

    from dalsegno.testing import Verdict, check_resume_thoroughly

    trials = check_resume_thoroughly(
        trains,
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


def _as_text(trials: Sequence[Trial]) -> str:
    """A line per interruption, followed by the message or difference if it is not exact."""
    lines = [""]
    for trial in trials:
        ranks = f"{trial.world_size} rank{'s' * (trial.world_size > 1)}"
        lines += [f"{trial.verdict:<10} {ranks:<8} {place}" for place in trial.breaks or ("from the beginning",)]
        if trial.words:
            lines.append(f"           {trial.words}")
    exact = all(trial.verdict == "exact" for trial in trials)
    return "\n".join([*lines, "", "Nothing differs at these places." if exact else "NOT EVERYTHING IS EXACT."])


_NOTHING = (
    "Nothing differs after these kills. Kills at other steps may show a difference: --thorough tries every epoch,\n"
    "--seed N other random steps, --kill-at those that you name."
)


class Checked:
    """What is checked: a function that builds a trainer, or a configuration. Each process of a leg finds it by name."""

    def __init__(self, name: str, overrides: Sequence[str]) -> None:
        self.name = name
        self.overrides = overrides

    def __call__(self, output_dir: Path) -> Any:
        """Build the trainer in the process of a leg, whose output goes to a file beside ``output_dir``."""
        redirect_output(output_dir.with_suffix(".txt"))
        return self.find(output_dir)()

    def find(self, output_dir: Path) -> Callable[[], Any]:

        if config.is_configuration(self.name):
            return config.RunConfig.read(self.name, [*self.overrides, f"args.output_dir={output_dir}"]).build
        if self.overrides:
            raise ConfigurationError(f"{self.name}: --set is for a configuration, such as run.toml")
        return config.Factory.find(self.name).bind({"output_dir": output_dir, "callbacks": []}, {})


_SECONDS = re.compile(r"(\d+\.?\d*|\.\d+)s")
_COUNTED = re.compile(r"(?P<name>\w+):(?P<count>\d+)(:(?P<path>.+))?")


def fault_plan(spec: str) -> FaultPlan:
    """Parse ``on_step_end:12``, ``write:3``, ``write:3:logs`` or ``2.5s``."""
    from dalsegno.events.callback import HANDLERS
    from dalsegno.testing.faults import FaultPlan, Operation

    if seconds := _SECONDS.fullmatch(spec):
        return FaultPlan(seconds=float(seconds[1]))
    counted = _COUNTED.fullmatch(spec)
    if counted is None or (counted["name"] in HANDLERS and counted["path"]):
        raise ConfigurationError(f"--kill-at {spec}: write it as on_step_end:12, write:3, write:3:logs or 2.5s")
    name: Any = counted["name"]
    count = int(counted["count"])
    if name in HANDLERS:
        return FaultPlan(event=HANDLERS[name], count=count)
    expect_known("event or operation", [name], [*HANDLERS, *get_args(Operation)])
    return FaultPlan(operation=name, count=count, path=counted["path"] or "")
