from pathlib import Path

import pytest

from dalsegno.logs import RecordLog


@pytest.fixture
def log(tmp_path: Path, suffix: str) -> RecordLog:
    return RecordLog(f"logs/train{suffix}", tmp_path)
