"""Train a small transformer, kill it twice with SIGKILL, resume it, and show that nothing differs.

The model learns the source code of Python's standard library, byte by byte. It is trained once without interruption,
and once killed between two steps and again during a checkpoint write. Then all tensors, states and log records of the
two runs are compared, and both losses are plotted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dalsegno.errors import ConfigurationError
from dalsegno.system.extras import require_extra

EXIT_STATUSES = {1: "the runs differ"}

LEAST_STEPS = 12


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("demo-run"), metavar="DIR", help="output directory; default: %(default)s"
    )
    parser.add_argument(
        "--steps", type=int, default=1200, metavar="N", help="optimizer steps of the run; default: %(default)s"
    )
    parser.add_argument(
        "--seed", type=int, default=7, metavar="N", help="seed of the training and the kills; default: %(default)s"
    )


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        ConfigurationError: for an invalid argument, before anything is trained.
        Locked: if another demo is running in the directory.
    """
    if arguments.steps < LEAST_STEPS:
        raise ConfigurationError(f"--steps {arguments.steps}: two kills need at least {LEAST_STEPS} steps")
    if arguments.seed < 0:
        raise ConfigurationError(f"--seed {arguments.seed}: must be at least 0")
    require_extra("analysis", "matplotlib", "the demo's plot")
    from .folder import own_folder

    with own_folder(arguments.out):
        print(f"Output directory: {arguments.out.absolute()}", flush=True)
        from .story import tell

        return tell(arguments.out, arguments.steps, arguments.seed)
