"""List, verify, inspect, compare, prune, clean, import and export checkpoints.

DIR is a run directory, its "checkpoints" directory, or a checkpoint. A command that needs one checkpoint takes the
newest in DIR.
"""

from __future__ import annotations

from . import contents, directory, exchange

COMMANDS = {
    "list": directory.list_all,
    "verify": directory.verify,
    "show": contents.show,
    "diff": contents.diff,
    "prune": directory.prune,
    "clean": directory.clean,
    "import": exchange.import_,
    "export": exchange.export,
}
"""In the order of the help."""
