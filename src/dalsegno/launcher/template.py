"""The process that ranks are forked from: imported only there, by multiprocessing's fork server.

A signal to the launcher's process group, or to all processes of a Slurm step, must not end it: its ranks would be
killed before they could save. The launcher forwards signals to the ranks; the fork server ends with the launcher.
"""

from __future__ import annotations

import os
import signal
import sys

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
