"""The other libraries, each a folder beside this file: what it has for the tests that are the same for all."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from interop.tried import Tried


def _modules(name: str) -> dict[str, ModuleType]:
    found = sorted(Path(__file__).parent.glob(f"*/{name}.py"))
    return {path.parent.name: importlib.import_module(f"interop.{path.parent.name}.{name}") for path in found}


EXAMPLES = _modules("example")
"""How a callback looks in the dialect; by the name of the folder, which ``dalsegno.interop`` has too."""
TRIED: list[Tried] = [each for module in _modules("tried").values() for each in module.TRIED]
"""Classes of the libraries, and what becomes of each here."""
