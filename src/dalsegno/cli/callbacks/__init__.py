"""List the available callbacks and show their arguments.

A configuration file uses the same names: see 'dalsegno train --help'.
"""

from __future__ import annotations

COMMANDS = ("list", "show")
"""In the order of the help."""
