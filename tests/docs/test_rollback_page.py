"""The rollbacks that docs/guides/stopping.md shows."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "images" / "rollback.py"


def test_a_training_that_diverges_reaches_the_loss_of_one_that_never_did(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("docs_images_rollback", SCRIPT)
    assert spec is not None and spec.loader is not None
    page: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    for name, settings in page.RUNS.items():
        page.train(tmp_path / name, **settings)
    losses = {name: page.eval_loss(tmp_path / name) for name in page.RUNS}
    assert [name for name, loss in losses.items() if math.isnan(loss)] == ["wrong samples", "learning rate too high"]
    for name in ("wrong samples, going back", "learning rate too high, going back"):
        assert losses[name] == pytest.approx(losses["without wrong samples"], rel=0.05)
