"""List, verify, inspect, compare, prune, clean, import and export checkpoints.

DIR is a run directory, its "checkpoints" directory, or a checkpoint. A command that needs one checkpoint takes the
newest in DIR.
"""

from __future__ import annotations

from dalsegno.cli.command import Command

from . import contents, directory, export, import_

_DAMAGED = {1: "a checkpoint is damaged"}

COMMANDS = {
    "list": Command(directory.list_, directory.describe_list, _DAMAGED),
    "verify": Command(directory.verify, directory.describe_verify, _DAMAGED),
    "show": Command(contents.show, contents.describe_show, {1: "a file of the checkpoint cannot be read"}),
    "diff": Command(contents.diff, contents.describe_diff, {1: "the checkpoints differ"}),
    "prune": Command(directory.prune, directory.describe_prune),
    "clean": Command(directory.clean, directory.describe_clean),
    "import": Command(import_.import_run, import_.describe_import, help=import_.__doc__),
    "export": Command(export.export, export.describe_export, help=export.__doc__),
}
"""In the order of the help."""
