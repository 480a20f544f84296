"""The base classes of other libraries can be imported under their own names.

``<library>/foreign`` has them with as much as their documentation says: methods that do nothing. The libraries
themselves need hardware, or other versions of everything; one that is installed is taken itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

NOT_INSTALLED = [path.parent for path in Path(__file__).parent.glob("*/foreign/*") if find_spec(path.name) is None]


@pytest.fixture(autouse=True, scope="module")
def foreign_libraries() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for folder in NOT_INSTALLED:
            patched.syspath_prepend(str(folder))
        yield
