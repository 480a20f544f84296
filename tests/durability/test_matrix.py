"""A part of the matrix: each kind of data once, broken off in each of its first epochs: docs/reference/data.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.testing import BRIEF
from durability.matrix import Cell, cells, key, shown, verdict

SHOWN = shown()
CELLS = [
    (cell, 2 if number % 4 and key(cell, 2) in SHOWN else 1)
    for number, cell in enumerate(cell for cell in cells() if not cell.workers)
    if key(cell, 1) in SHOWN
][::2]
"""Every other kind, on one rank and on two in turn. ``make soak`` tries them all, and with worker processes too."""


@pytest.mark.parametrize(("cell", "world_size"), CELLS, ids=lambda value: getattr(value, "kind", None))
def test_a_kind_of_data(tmp_path: Path, cell: Cell, world_size: int) -> None:
    found, trials = verdict(cell, world_size, tmp_path, BRIEF[world_size - 1 :][:1])
    assert found == SHOWN[key(cell, world_size)], "\n".join(map(str, trials))
