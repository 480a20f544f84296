"""The scripts of docs/ that make pages and pictures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def script(name: str) -> Any:
    """A script of docs/, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name.replace('/', '_')}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
