"""Sending a command to a job, over HTTP or as a file, and printing what became of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from dalsegno.cli.tables import print_json, visible
from dalsegno.errors import ConfigurationError

from .arguments import add_job, add_json, remote_client, required_job

WAIT = 60.0
"""Seconds that a command waits for its effect, by default."""

FAILED = 1
EXIT_STATUSES = {FAILED: "the command had no effect"}


def add_sending(parser: argparse.ArgumentParser) -> None:
    """The arguments of a command that is sent."""
    add_job(parser)
    parser.add_argument(
        "--wait",
        type=float,
        default=WAIT,
        metavar="SECONDS",
        help="wait this long for the effect, which comes at the end of a step; 0: only until the command is "
        "accepted; default: %(default)g",
    )
    add_json(parser)


def sends(command: str) -> Callable[[argparse.Namespace], int]:
    """Return what runs a command without data."""
    return lambda arguments: send(arguments, command)


def send(arguments: argparse.Namespace, command: str, data: Mapping[str, Any] | None = None) -> int:
    """Send ``command`` to the job; returns the exit status.

    Raises:
        NotFound: if there is no such job.
        NotRunning: if it is dead, or takes no more commands.
        ConfigurationError: if the job does not accept the command.
    """
    from dalsegno.control.client import send_command

    if not 0 <= arguments.wait <= 600:
        raise ConfigurationError(f"--wait {arguments.wait:g}: must be from 0 to 600 seconds")
    if arguments.remote:
        with remote_client(arguments) as client:
            answer = client.send(command, data, wait=arguments.wait)
    else:
        answer = send_command(required_job(arguments), command, data, wait=arguments.wait)
    if arguments.json:
        print_json(answer)
    elif answer.get("error"):
        print(visible(f"{command}: had no effect: {answer['error']}"))
    elif answer.get("step") is not None:
        print(visible(f"{command}: took effect at the end of step {answer['step']}"))
    else:
        print(f"{command}: accepted; it takes effect at the end of one of the next steps")
    return FAILED if answer.get("error") else 0
