"""Save a checkpoint at the end of a step."""

from __future__ import annotations

from .sending import EXIT_STATUSES as EXIT_STATUSES
from .sending import add_sending, sends

describe = add_sending
run = sends("save_checkpoint")
