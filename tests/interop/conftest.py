"""The base classes of other libraries can be imported under their own names.

``<library>/foreign`` has them with as much as their documentation says: methods that do nothing. The libraries
themselves need hardware, or other versions of everything.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def foreign_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in Path(__file__).parent.glob("*/foreign"):
        monkeypatch.syspath_prepend(str(folder))
