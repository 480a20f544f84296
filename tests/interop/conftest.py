from __future__ import annotations

from pathlib import Path

import pytest

FOREIGN = Path(__file__).parent / "foreign"


@pytest.fixture(autouse=True)
def foreign_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base classes of other libraries can be imported under their own names."""
    monkeypatch.syspath_prepend(str(FOREIGN))
