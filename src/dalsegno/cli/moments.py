"""When to kill, as it is written on a command line."""

from __future__ import annotations

from dalsegno.callback import HANDLERS
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.testing import FaultPlan

OPERATIONS = ("write", "fsync", "rename", "mkdir", "unlink", "truncate", "any")


def moment(spec: str) -> FaultPlan:
    """``on_step_end:12``, ``write:3``, ``write:3:logs`` or ``2.5s``.

    Raises:
        ConfigurationError: for anything else; UnknownName for an event or operation that there is not.
    """
    name, colon, rest = spec.partition(":")
    count, _, path = rest.partition(":")
    try:
        if not colon and name.endswith("s"):
            return FaultPlan(seconds=float(name[:-1]))
        number = int(count)
    except ValueError as error:
        raise ConfigurationError(
            f"--kill-at {spec}: give a moment such as on_step_end:12, write:3, write:3:logs or 2.5s"
        ) from error
    if name in OPERATIONS:
        return FaultPlan(operation=name, count=number, path=path)
    if name in HANDLERS and not path:
        return FaultPlan(event=HANDLERS[name], count=number)
    raise UnknownName("moment", name, [*HANDLERS, *OPERATIONS])
