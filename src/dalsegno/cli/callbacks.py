"""What callbacks there are, and what one of them can be given.

    dalsegno callbacks list
    dalsegno callbacks show DivergenceDetector
    dalsegno callbacks show my_package.hooks:Beat

These are the names that a configuration may use: see 'dalsegno train --help'.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.errors import ConfigurationError

if TYPE_CHECKING:
    from dalsegno.config import Offer


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="list|show", required=True)
    listing = actions.add_parser("list", help="every callback that has a bare name")
    showing = actions.add_parser("show", help="what one is for, and its arguments")
    showing.add_argument("name", metavar="NAME", help="one that 'list' shows, or module:Class")
    for action in (listing, showing):
        action.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        UnknownName: if there is no such callback; the message names the nearest.
        ConfigurationError: if it cannot be imported.
    """
    sys.path.insert(0, str(Path.cwd()))
    import json

    from dalsegno.config import offers

    if arguments.action == "list":
        rows = [_row(offer) for offer in offers()]
        print(json.dumps(rows, indent=2) if arguments.json else _as_list(rows))
    else:
        shown = _show(arguments.name)
        print(json.dumps(shown, indent=2) if arguments.json else _as_page(shown))
    return 0


def _row(offer: Offer) -> dict[str, Any]:
    from dalsegno.config import prose

    try:
        summary = prose(offer.load()).partition("\n")[0]
    except ConfigurationError as error:  # one that is broken hides no other
        summary = str(error)
    return {"name": offer.name, "origin": offer.origin, "summary": summary}


def _as_list(rows: list[dict[str, Any]]) -> str:
    name, origin = (max(len(row[key]) for row in rows) for key in ("name", "origin"))
    return "\n".join(f"{row['name']:{name}}  {row['origin']:{origin}}  {row['summary']}" for row in rows)


def _show(name: str) -> dict[str, Any]:
    from dalsegno.config import describe, find_callback, prose, signature_of

    made = find_callback(name)
    return {
        "name": name,
        "doc": prose(made),
        "arguments": [
            {
                "name": each.name,
                "type": describe(each.annotation),
                "required": each.required,
                "default": None if each.required else repr(each.default),
                "doc": each.doc,
            }
            for each in signature_of(made).values()
        ],
        "handlers": _handlers(made),
        "has_state": hasattr(made, "state_dict"),
    }


def _as_page(shown: dict[str, Any]) -> str:
    lines = [shown["doc"] or shown["name"], "", "Arguments" if shown["arguments"] else "No arguments."]
    for each in shown["arguments"]:
        given = "required" if each["required"] else f"default {each['default']}"
        lines += [f"  {each['name']}: {each['type']}; {given}"]
        lines += textwrap.wrap(each["doc"], 100, initial_indent="      ", subsequent_indent="      ")
    lines += ["", f"Listens to {', '.join(shown['handlers']) or 'nothing'}."]
    lines += ["Has state, which is saved with each checkpoint." if shown["has_state"] else "Has no state."]
    return "\n".join(lines)


def _handlers(made: Any) -> list[str]:
    """Of a class: what it defines itself, in the order of events where it is one of ours."""
    from dalsegno.callback import HANDLERS, Callback

    own = [name for name in dir(made) if name.startswith("on_") and callable(getattr(made, name))]
    if not (isinstance(made, type) and issubclass(made, Callback)):
        return own
    return [name for name in HANDLERS if name in own and getattr(made, name) is not getattr(Callback, name)]
