"""docs/coming-from, classes of other libraries: each line of the tables is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dalsegno as ds
from interop.libraries import TRIED
from interop.tried import Tried


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tried", TRIED, ids=lambda tried: tried.name)
def test_a_class_of_another_library(tried: Tried, tmp_path: Path) -> None:
    if tried.refused:
        with pytest.raises(ds.ConfigurationError, match=re.escape(tried.refused)):
            tried.trainer(tmp_path, tried.make())
        return
    found = tried.differences(tmp_path)
    assert tuple(found)[: len(tried.what)] == tried.what, found
    assert bool(found) == bool(tried.what) == bool(tried.differs), found
