"""Commands to a running job: accepted, recorded, and carried out at a step boundary. Does not import torch.

The names are imported lazily, so that a client imports nothing of the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.imports import lazy_exports

if TYPE_CHECKING:
    from dalsegno.logs.journal import Journal as Journal

    from .commands import COMMANDS as COMMANDS
    from .commands import Command as Command
    from .commands import CommandKind as CommandKind
    from .commands import parse_command as parse_command
    from .inbox import Answer as Answer
    from .inbox import Inbox as Inbox
    from .inbox import send as send
    from .queue import CommandQueue as CommandQueue
    from .queue import Outcome as Outcome
    from .queue import Ticket as Ticket
else:
    __getattr__, __dir__ = lazy_exports(__name__)
