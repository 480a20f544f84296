"""Train one model on machines that communicate rarely: a server for the global parameters, and its workers.

docs/diloco.md describes how.
"""

from __future__ import annotations

COMMANDS = ("serve", "worker", "status")
"""In the order of the help."""
