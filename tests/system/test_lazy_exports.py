"""Lazily exported names: an error inside a module is shown as it is; ``import *`` finds them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

PACKAGE = """
from typing import TYPE_CHECKING

from dalsegno.system.imports import lazy_exports

if TYPE_CHECKING:
    from .broken import Part as Part
else:
    __getattr__, __dir__ = lazy_exports(__name__)
"""


def test_an_attribute_error_of_a_module_is_not_a_name_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lazily_exported"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "broken.py").write_text("import math\n\nPart = math.no_such_function\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module("lazily_exported")
    for attempt in (lambda: package.Part, lambda: exec("from lazily_exported import Part")):
        with pytest.raises(
            ImportError, match=r"broken cannot be imported: .*'math' has no attribute 'no_such_function'"
        ):
            attempt()
    with pytest.raises(AttributeError, match="module 'lazily_exported' has no attribute 'Other'"):
        _ = package.Other


@pytest.mark.parametrize("package", ["callbacks", "control", "diloco"])
def test_a_star_imports_the_lazy_names(package: str) -> None:
    names: dict[str, object] = {}
    exec(f"from dalsegno.{package} import *", names)
    assert names.keys() >= set(importlib.import_module(f"dalsegno.{package}").__all__)
    assert "lazy_exports" not in names
