"""Switch a callback that only observes off, or on again.

KEY is the callback's key, as 'dalsegno jobs callbacks' shows it.
"""

from __future__ import annotations

import argparse

from dalsegno.errors import ConfigurationError

from .sending import EXIT_STATUSES as EXIT_STATUSES
from .sending import add_sending, send


def describe(parser: argparse.ArgumentParser) -> None:
    add_sending(parser)
    parser.add_argument("words", metavar="KEY on|off", nargs="*", help="the callback, and on or off")


def run(arguments: argparse.Namespace) -> int:
    """Send the command; raises as :func:`send` does.

    Raises:
        ConfigurationError: if it is not a key followed by ``on`` or ``off``.
    """
    words = list(arguments.words)
    if arguments.remote and len(words) == 1:  # JOB may be left out
        words, arguments.job = [arguments.job, *words], None
    if len(words) != 2 or words[1] not in ("on", "off"):
        raise ConfigurationError("switch: needs JOB KEY on, or JOB KEY off")
    return send(arguments, "switch", {"callback": words[0], "on": words[1] == "on"})
