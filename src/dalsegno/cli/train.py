"""Train a run that a TOML, YAML or JSON file describes, from wherever it is.

The file names the function that builds the trainer; the module is looked for in the current folder first:

    trainer = "my_training:build"
    callbacks = [{use = "JsonLogger", run = "baseline"}, {use = "ProgressCallback", enabled = false}]

    [args]                 # TrainingArguments
    output_dir = "runs/a"
    max_steps = 1000

    [factory]              # what else the function takes
    width = 64

    # my_training.py
    def build(args, callbacks, width=32):
        return dalsegno.Trainer(Model(width), args, callbacks=callbacks, train_dataset=...)

Everything is checked before anything is built. On several processes: torchrun --no-python --nproc-per-node 8 dalsegno
train run.toml. Exit status 0: trained to its end; 1: stopped before it; 2: the file cannot work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("config", type=Path, metavar="FILE", help="such as run.toml")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="another value than the file's, in TOML; what is no TOML value is text: args.max_steps=100, "
        "factory.width=64, callbacks.JsonLogger.run=baseline, callbacks.ProgressCallback.enabled=false",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--from", dest="checkpoint", metavar="CHECKPOINT", help="go on from this one, not the newest")
    where.add_argument("--start-over", action="store_true", help="move what is in output_dir aside, and start anew")
    parser.add_argument(
        "--continue-stopped",
        action="store_true",
        help="go on although a callback has judged the training to be over (early stopping, a divergence)",
    )
    parser.add_argument(
        "--check", action="store_true", help="check the file, print every setting as JSON, and train nothing"
    )


def suggest(unknown: Sequence[str]) -> str:
    """For an option that is a setting of the file: how to give it here."""
    from dalsegno.args import MEANT, TrainingArguments

    name, equals, value = unknown[0].removeprefix("--").partition("=")
    name = name.replace("-", "_")
    name = MEANT.get(name, name)
    if name not in TrainingArguments.__dataclass_fields__:
        return "; settings of the file are given as --set KEY=VALUE"
    value = value if equals else next((word for word in unknown[1:2] if not word.startswith("--")), "VALUE")
    return f"; did you mean --set args.{name}={value}?"


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        ConfigurationError: if something in the file cannot work; UnknownName names the nearest.
        NotFound: if there is no such file, or no such checkpoint.
    """
    sys.path.insert(0, str(Path.cwd()))

    from dalsegno.config import RunConfig

    config = RunConfig.read(arguments.config, arguments.set)
    if arguments.check:
        print(config.as_json())
        return 0
    origin = arguments.checkpoint or not arguments.start_over
    more = {"continue_stopped": True} if arguments.continue_stopped else {}
    result = config.build().train(origin, **more)
    return 0 if result is None or result.reason in ("finished", "exhausted") else 1
