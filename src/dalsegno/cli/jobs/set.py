"""Change settings of a job from the end of a step on.

Settings: learning_rate (a value, or a factor written x0.5), logging_steps, eval_steps, save_steps, max_steps.

  dalsegno jobs set runs/a learning_rate=x0.5 save_steps=200
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from dalsegno.errors import ConfigurationError

from .sending import EXIT_STATUSES as EXIT_STATUSES
from .sending import add_sending, send


def describe(parser: argparse.ArgumentParser) -> None:
    add_sending(parser)
    parser.add_argument("settings", metavar="NAME=VALUE", nargs="*", help="say learning_rate=3e-4")


def run(arguments: argparse.Namespace) -> int:
    """Send the command; raises as :func:`send` does.

    Raises:
        ConfigurationError: if a setting is not written NAME=VALUE, or named twice.
    """
    words = list(arguments.settings)
    if arguments.remote and arguments.job is not None and "=" in arguments.job:
        words, arguments.job = [arguments.job, *words], None
    data: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"{word!r}: write NAME=VALUE, say learning_rate=3e-4")
        if name in data:
            raise ConfigurationError(f"{name} is given twice")
        data[name] = _value(name, value)
    return send(arguments, "set", data)


def _value(name: str, text: str) -> Any:
    is_factor = text[:1] in ("x", "×", "*")
    try:
        value = json.loads(text[1:] if is_factor else text)
    except ValueError:
        raise ConfigurationError(f"{name}={text}: needs a number, or a factor such as x0.5") from None
    return {"factor": value} if is_factor else value
