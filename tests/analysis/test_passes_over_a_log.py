"""A long log is not read once for each thing that is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dalsegno.analysis import TrainingLog, View, open_log, plot_logs, write_report
from dalsegno.analysis.formats.json_lines import JsonLines

GOLDEN = Path(__file__).parents[1] / "golden" / "logs"


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    done: list[Path] = []
    blocks = JsonLines.blocks

    def counted(self: JsonLines, *rest: Any) -> Any:
        done.append(self.path)
        return blocks(self, *rest)

    monkeypatch.setattr(JsonLines, "blocks", counted)
    yield done


@pytest.mark.parametrize(
    "ask",
    [
        lambda log, folder: plot_logs([log], ["loss", "grad_norm", "learning_rate"], View(x="time")),
        lambda log, folder: write_report([log], folder / "report.html"),
    ],
    ids=["plot", "report"],
)
def test_two_readings_do(ask: Callable[[TrainingLog, Path], Any], readings: list[Path], tmp_path: Path) -> None:
    """One for the names, one for the values."""
    ask(open_log(GOLDEN / "pair-a"), tmp_path)
    assert 1 <= sum(path.name == "train.jsonl" for path in readings) <= 2
