"""List, verify, inspect, compare, prune, clean, import and export checkpoints.

DIR is a run directory, its "checkpoints" directory, or a checkpoint. A command that needs one checkpoint takes the
newest in DIR.
"""

from __future__ import annotations

COMMANDS = ("list", "verify", "show", "diff", "prune", "clean", "import", "export")
"""In the order of the help."""
