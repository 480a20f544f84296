"""Commands to a running job: accepted, recorded, and carried out at a step boundary. Does not import torch.

The names are imported lazily, so that a client imports nothing of the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .commands import COMMANDS, Command, CommandKind, parse_command
    from .journal import Journal
    from .queue import CommandQueue, Outcome, Ticket

_HOMES = {
    "commands": ("COMMANDS", "Command", "CommandKind", "parse_command"),
    "journal": ("Journal",),
    "queue": ("CommandQueue", "Outcome", "Ticket"),
}

__all__ = [
    "COMMANDS",
    "Command",
    "CommandKind",
    "CommandQueue",
    "Journal",
    "Outcome",
    "Ticket",
    "parse_command",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
