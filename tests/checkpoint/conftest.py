"""Where memory checkpoints lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.checkpoint import memory_dir


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of the test in place of /dev/shm, beside that of its run."""
    (tmp_path / "shared memory").mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.setenv(memory_dir.PLACE_VARIABLE, str(tmp_path / "shared memory"))
