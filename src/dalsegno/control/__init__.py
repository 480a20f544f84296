"""Commands to a running job: accepted, recorded, and carried out at a step boundary. Does not import torch.

The names are imported lazily, so that a client imports nothing of the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.imports import lazy_exports

if TYPE_CHECKING:
    from dalsegno.logs.journal import Journal as Journal

    from .commands import COMMANDS, Command, CommandKind, parse_command
    from .inbox import Answer, Inbox, send
    from .queue import CommandQueue, Outcome, Ticket

_HOMES = {
    "commands": ("COMMANDS", "Command", "CommandKind", "parse_command"),
    "inbox": ("Answer", "Inbox", "send"),
    "queue": ("CommandQueue", "Journal", "Outcome", "Ticket"),
}

__all__ = [
    "COMMANDS",
    "Answer",
    "Command",
    "CommandKind",
    "CommandQueue",
    "Inbox",
    "Journal",
    "Outcome",
    "Ticket",
    "parse_command",
    "send",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
