"""Where pickles are read."""

from __future__ import annotations

import pytest

from checkpoint import forked_reader
from dalsegno.checkpoint.interchange import pickles


@pytest.fixture
def warm_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickles are read in a forked process, which has torch already; in tests without it, in one as users have it."""
    monkeypatch.setattr(pickles, "subprocess", forked_reader)
