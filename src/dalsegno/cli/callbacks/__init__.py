"""What callbacks there are, and what one of them can be given.

These are the names that a configuration may use: see 'dalsegno train --help'.
"""

from __future__ import annotations

COMMANDS = ("list", "show")
"""In the order of their help."""
