"""Scenarios of training: state that a checkpoint contains, and state that only the script has.

Each is a small function that builds a run, as a user's script would. A run of three epochs is killed three steps after
a checkpoint, and stopped at one, twice each, and resumed; then it is held against one that was never interrupted.

``python -m durability.scenarios --write`` tries all of them and writes what became of each to ``shown.json``, from
which ``docs/reference/resume-proof.py`` makes its table; the tests try a part, and hold it against the same file.
"""

from __future__ import annotations

from . import callbacks, changes, data, healthy, loops, models, optimizers  # noqa: F401
from .scenario import SCENARIOS as SCENARIOS
