"""Look at the checkpoints of a run, check, compare, thin out and export them.

DIR is a run's folder, its folder "checkpoints", or one checkpoint. Where one checkpoint is needed and DIR has several,
the newest is taken.
"""

from __future__ import annotations

COMMANDS = ("list", "verify", "show", "diff", "prune", "export")
"""In the order of their help."""
