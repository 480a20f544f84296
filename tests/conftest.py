"""For all tests."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background job. What the tests start would inherit it, and never be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in each run, and no clock: what passes here, passes on a busy machine too. `pytest
# --hypothesis-profile=search` tries others.
steady = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("search", **steady)
settings.register_profile("steady", **steady, derandomize=True, database=None)
settings.load_profile("steady")

# A proxy would be asked for what lies on this machine.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"

# What a terminal is like is said by the tests that need one.
os.environ["TERM"] = "xterm"
for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
