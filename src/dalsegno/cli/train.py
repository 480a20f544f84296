"""Train the run that a TOML, YAML or JSON file describes; an interrupted run resumes.

The file names the function that builds the trainer. Its module is searched in the current directory first:

    trainer = "my_training:build"
    callbacks = [{use = "JsonLogger", run = "baseline"}, {use = "ProgressCallback", enabled = false}]

    [args]                 # TrainingArguments
    output_dir = "runs/a"
    max_steps = 1000

    [factory]              # further arguments of the function
    width = 64

    # my_training.py
    def build(args, callbacks, width=32):
        return dalsegno.Trainer(Model(width), args, callbacks=callbacks, train_dataset=...)

The whole file is checked before anything is built. On several GPUs:

    dalsegno launch --nproc 8 run.toml
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dalsegno import config
from dalsegno.cli.command import OF_TRAINING, argument, command, flag, one_of
from dalsegno.errors import ConfigurationError


def suggest(unknown: Sequence[str]) -> str:
    """How to set on the command line what was passed as an unknown option."""
    from dalsegno.args import TrainingArguments, answers

    settings = TrainingArguments.__dataclass_fields__
    name, equals, value = unknown[0].removeprefix("--").partition("=")
    name = name.replace("-", "_")
    name = answers(settings, "Trainer").get(name, name)
    if name not in settings:
        return "; to override a setting of the file, use --set KEY=VALUE"
    value = value if equals else next((word for word in unknown[1:2] if not word.startswith("--")), "VALUE")
    return f"; did you mean --set args.{name}={value}?"


@command(
    argument("config", type=Path, metavar="FILE", help="configuration: .toml, .yaml or .json"),
    argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override a value of the file, such as args.max_steps=100, factory.width=64, "
        "callbacks.JsonLogger.run=baseline or callbacks.ProgressCallback.enabled=false; VALUE is TOML, otherwise text; "
        "may be repeated",
    ),
    one_of(
        argument(
            "--from",
            dest="checkpoint",
            metavar="CHECKPOINT",
            help="resume from this checkpoint; default: the newest that verifies",
        ),
        flag("--start-over", help="move the run in output_dir into its rewound/ and start from scratch"),
    ),
    flag(
        "--continue-stopped",
        help="continue a run that a callback ended for good (early stopping, divergence); default: do nothing",
    ),
    flag("--check", help="check the file and print every setting as JSON; no training"),
    statuses=OF_TRAINING,
    help=__doc__,
    suggest=suggest,
)
def train(arguments: argparse.Namespace) -> int:
    sys.path.insert(0, str(Path.cwd()))

    if ":" in str(arguments.config) and not config.is_configuration(arguments.config):
        raise ConfigurationError(f"{arguments.config}: needs a file; a function is for 'dalsegno launch --nproc 1'")
    run = config.RunConfig.read(arguments.config, arguments.set)
    if arguments.check:
        print(run.as_json())
        return 0
    origin = arguments.checkpoint or not arguments.start_over
    more = {"continue_stopped": True} if arguments.continue_stopped else {}
    result = run.build().train(origin, **more)
    return 0 if result is None else result.exit_status
