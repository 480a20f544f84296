from __future__ import annotations

import pytest

from config import sample


@pytest.fixture(autouse=True)
def nothing_built() -> None:
    sample.built.clear()
