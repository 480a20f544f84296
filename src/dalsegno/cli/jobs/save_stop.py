"""Save a checkpoint and end, as 'dalsegno jobs stop' does."""

from __future__ import annotations

from .sending import EXIT_STATUSES as EXIT_STATUSES
from .sending import add_sending, sends

describe = add_sending
run = sends("save_and_stop")
