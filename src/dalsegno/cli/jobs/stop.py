"""Save a checkpoint and end; the next start of the job resumes."""

from __future__ import annotations

from .sending import EXIT_STATUSES as EXIT_STATUSES
from .sending import add_sending, sends

describe = add_sending
run = sends("graceful_stop")
