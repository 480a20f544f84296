"""Train a small transformer, kill it twice with SIGKILL, resume it, and show that nothing differs.

The run learns the bytes of Python's own standard library. It is trained once without interruption, and once killed
between two steps and while a checkpoint is being written. Then every tensor, every state and every log record of the
two are compared, and their losses are drawn. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dalsegno.errors import ConfigurationError

LEAST_STEPS = 12


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--out", type=Path, default=Path("demo-run"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=1200, metavar="N", help="optimizer steps; default: %(default)s")
    parser.add_argument(
        "--seed", type=int, default=7, metavar="N", help="of the training and of the kills; default: %(default)s"
    )


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        ConfigurationError: before anything is trained, for arguments that cannot work.
        Locked: if another demo is at work in the folder.
    """
    from importlib.util import find_spec

    from dalsegno.system.extras import how_to_install

    if arguments.steps < LEAST_STEPS:
        raise ConfigurationError(f"--steps {arguments.steps}: two kills need at least {LEAST_STEPS} steps")
    if arguments.seed < 0:
        raise ConfigurationError(f"--seed {arguments.seed}: needs 0 or more")
    if find_spec("matplotlib") is None:
        raise ConfigurationError(f"the demo draws its losses with matplotlib: {how_to_install('analysis')}")
    from .folder import own_folder

    with own_folder(arguments.out):
        print(f"All of this goes to {arguments.out.absolute()}", flush=True)
        from .story import tell

        return tell(arguments.out, arguments.steps, arguments.seed)
