"""Where pickles are read, and where memory checkpoints lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint import forked_reader
from dalsegno.checkpoint.format import memory_dir
from dalsegno.checkpoint.interchange import pickles


@pytest.fixture
def warm_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickles are read in a forked process, which has torch already; in tests without it, in one as users have it."""
    monkeypatch.setattr(pickles, "subprocess", forked_reader)


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of the test in place of /dev/shm, beside that of its run."""
    (tmp_path / "shared memory").mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.setenv(memory_dir.PLACE_VARIABLE, str(tmp_path / "shared memory"))
