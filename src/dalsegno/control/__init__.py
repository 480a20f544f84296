"""Commands to a running job: accepted, recorded, and carried out at a step boundary. Does not import torch.

The names are imported lazily, so that a client imports nothing of the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.imports import lazy_exports

if TYPE_CHECKING:
    from dalsegno.logs.journal import Journal as Journal

    from .client import JobClient as JobClient
    from .client import asks_over_http as asks_over_http
    from .client import resolve as resolve
    from .client import running as running
    from .client import send_command as send_command
    from .client import sender as sender
    from .commands import COMMANDS as COMMANDS
    from .commands import Command as Command
    from .commands import CommandKind as CommandKind
    from .commands import parse_command as parse_command
    from .feed import PLACE as PLACE
    from .inbox import Answer as Answer
    from .inbox import Inbox as Inbox
    from .inbox import send as send
    from .jobs import Job as Job
    from .jobs import list_jobs as list_jobs
    from .jobs import remove_dead as remove_dead
    from .jobs import write_private as write_private
    from .queue import CommandQueue as CommandQueue
    from .queue import Outcome as Outcome
    from .queue import Ticket as Ticket
else:
    __getattr__, __dir__ = lazy_exports(__name__)
    __all__ = __dir__()
