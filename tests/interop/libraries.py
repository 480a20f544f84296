"""The other libraries: each folder beside this file has an ``example.py`` that says how one looks in its dialect."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

EXAMPLES: dict[str, ModuleType] = {
    path.parent.name: importlib.import_module(f"interop.{path.parent.name}.example")
    for path in sorted(Path(__file__).parent.glob("*/example.py"))
}
"""By the name of the folder, which ``dalsegno.interop`` has too."""
