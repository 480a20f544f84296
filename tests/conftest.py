"""For all tests."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background job. What the tests start would inherit it, and never be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
