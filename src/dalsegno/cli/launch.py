"""Train on several ranks of this host (or several hosts), and restart them when one fails.

What to run is one of:

    dalsegno launch --nproc 8 run.toml --set args.max_steps=1000    a configuration, with the options of 'train'
    dalsegno launch --nproc 8 my_training:build output_dir=runs/a   a function that returns a trainer, with arguments
    dalsegno launch --nproc 8 train.py --width 64                   a script, with its arguments

A rank that is killed, fails, or makes no step for --hang-timeout seconds ends all ranks; they start again from the
newest checkpoint that verifies. Three legs in a row that got no further than an earlier one end the job. SIGTERM,
SIGUSR1 and Ctrl-C are passed on to all ranks, which save and stop together.

A script ends with sys.exit(trainer.train().exit_status), so that its exit status is one of these.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno import config
from dalsegno.cli.command import OF_TRAINING, argument, command, option, parse
from dalsegno.cli.console import complain
from dalsegno.errors import ConfigurationError

if TYPE_CHECKING:
    from dalsegno.launcher.targets import Target


@command(
    option(
        "--nproc", metavar="N", default="auto", help="ranks on this host; auto: one per GPU, or one (default: auto)"
    ),
    option(
        "--nnodes",
        metavar="N|MIN:MAX",
        default="1",
        help="number of hosts, on each of which this command runs (default: 1)",
    ),
    option(
        "--rdzv-endpoint", metavar="HOST:PORT", help="one of the hosts and a free port there; the same on all hosts"
    ),
    option("--rdzv-id", metavar="ID", help="name of the job at that address (default: Slurm's job id)"),
    option("--max-restarts", metavar="R", default=3, help="restarts after a failure (default: 3)"),
    option(
        "--hang-timeout",
        metavar="SECONDS",
        default=1800.0,
        help="ranks that train but make no step for this long are restarted; must exceed the longest step, evaluation "
        "or save; inf: never (default: 1800)",
    ),
    argument("what", metavar="CONFIG|MODULE:FACTORY|SCRIPT.py", help="what to run: see above"),
    argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="options of 'train'; NAME=VALUE of the function (a TOML value, or text); or the script's arguments",
    ),
    statuses=OF_TRAINING,
    help=__doc__,
)
def launch(arguments: argparse.Namespace) -> int:
    sys.path.insert(0, str(Path.cwd()))

    from dalsegno.launcher.launch import run_job
    from dalsegno.launcher.options import LaunchOptions

    options = LaunchOptions(
        arguments.nproc,
        arguments.nnodes,
        arguments.max_restarts,
        arguments.hang_timeout,
        arguments.rdzv_endpoint,
        arguments.rdzv_id,
    )
    end = run_job(_target(arguments.what, arguments.arguments), options)
    if end.why:
        complain(end.why)
    return end.status


def _target(what: str, words: list[str]) -> Target:
    from dalsegno.launcher.targets import ConfigTarget, FactoryTarget, ScriptTarget

    from .train import train

    if config.is_configuration(what):
        parser = argparse.ArgumentParser(prog="dalsegno launch", usage="%(prog)s … FILE [options of 'dalsegno train']")
        train.describe(parser)
        given = parse(parser, [what, *words])
        if given.check:
            raise ConfigurationError(f"--check trains nothing: dalsegno train {what} --check")
        return ConfigTarget(what, given.set, given.checkpoint, given.start_over, given.continue_stopped)
    if Path(what).suffix == ".py":
        return ScriptTarget(what, words)
    if ":" not in what:
        raise ConfigurationError(
            f"{what!r}: give a configuration (run.toml), a function that returns a trainer (my_training:build), or a "
            "script (train.py)"
        )
    factory = config.Factory.find(what)
    written = config.read_assignments(words, what)
    factory.bind({"callbacks": []}, written)
    arguments, _ = factory.check(written, lambda _: what)
    return FactoryTarget(factory.function, arguments=arguments)
