"""List the available callbacks and show their arguments.

A configuration file uses the same names: see 'dalsegno train --help'.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from dalsegno import config
from dalsegno.cli.command import JSON, argument, command
from dalsegno.cli.console import print_json, print_rows, print_table, texts
from dalsegno.errors import ConfigurationError


@command(JSON)
def _list(arguments: argparse.Namespace) -> int:
    """List every callback with a short name: built-in ones, and those that installed packages provide."""
    rows = []
    for entry in config.named_callbacks():
        try:
            text = config.summary(entry.load())
        except ConfigurationError as error:  # it cannot be imported
            text = str(error)
        rows.append({"name": entry.name, "origin": entry.origin, "summary": text})
    print_rows(texts(name="callback", origin="from", summary=""), rows, as_json=arguments.json)
    return 0


@command(
    argument("name", metavar="NAME", help="callback, say DivergenceDetector or my_package.callbacks:MyCallback"), JSON
)
def _show(arguments: argparse.Namespace) -> int:
    """Show the description of a callback and its arguments.

    NAME is a name from 'dalsegno callbacks list', or module:Class; the module is searched in the current directory
    first.
    """
    sys.path.insert(0, str(Path.cwd()))

    made = config.find_callback(arguments.name)
    shown = {
        "name": arguments.name,
        "doc": config.prose(made),
        "arguments": [
            {
                "name": each.name,
                "type": config.describe(each.annotation),
                "required": each.required,
                "default": None if each.required else repr(each.default),
                "doc": each.doc,
            }
            for each in config.signature_of(made).values()
        ],
        "handlers": _handlers(made),
        "has_state": hasattr(made, "state_dict"),
    }
    if arguments.json:
        print_json(shown)
        return 0
    print(shown["doc"] or shown["name"], end="\n\n")
    if shown["arguments"]:
        rows = [{**each, "default": "required" if each["required"] else each["default"]} for each in shown["arguments"]]
        print_table(texts(name="argument", type="type", default="default", doc=""), rows)
        print()
    print(f"Handles {', '.join(shown['handlers']) or 'no event'}.")
    print("Has state, saved with each checkpoint." if shown["has_state"] else "Has no state.")
    return 0


def _handlers(made: Any) -> list[str]:
    """Handlers of a class and its bases, except those of its library's ``Callback`` base class."""
    from dalsegno.events.callback import HANDLERS

    if not isinstance(made, type):
        return []
    package = made.__module__.partition(".")[0]
    own = [cls for cls in made.__mro__ if cls.__module__.partition(".")[0] == package and cls.__name__ != "Callback"]
    found = {name for cls in own for name in vars(cls) if name.startswith("on_")}
    return [*(name for name in HANDLERS if name in found), *sorted(found - set(HANDLERS))]


COMMANDS = {"list": _list, "show": _show}
"""In the order of the help."""
