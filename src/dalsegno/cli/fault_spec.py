"""``--kill-at SPEC``: a fault plan from its text."""

from __future__ import annotations

import re

from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events.callback import HANDLERS
from dalsegno.testing import FaultPlan

OPERATIONS = ("write", "fsync", "rename", "mkdir", "unlink", "truncate", "any")

_SECONDS = re.compile(r"(\d+\.?\d*|\.\d+)s")
_COUNTED = re.compile(r"(?P<name>\w+):(?P<count>\d+)(:(?P<path>.+))?")


def fault_plan(spec: str) -> FaultPlan:
    """Parse ``on_step_end:12``, ``write:3``, ``write:3:logs`` or ``2.5s``.

    Raises:
        ConfigurationError: for any other form.
        UnknownName: for an unknown event or operation; suggests the nearest.
    """
    if seconds := _SECONDS.fullmatch(spec):
        return FaultPlan(seconds=float(seconds[1]))
    counted = _COUNTED.fullmatch(spec)
    if counted is None or (counted["name"] in HANDLERS and counted["path"]):
        raise ConfigurationError(f"--kill-at {spec}: write it as on_step_end:12, write:3, write:3:logs or 2.5s")
    name, count = counted["name"], int(counted["count"])
    if name in HANDLERS:
        return FaultPlan(event=HANDLERS[name], count=count)
    if name in OPERATIONS:
        return FaultPlan(operation=name, count=count, path=counted["path"] or "")
    raise UnknownName("event or operation", name, [*HANDLERS, *OPERATIONS])
