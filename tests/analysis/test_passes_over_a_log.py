"""A long log is not read once for each thing that is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dalsegno.analysis import TrainingLog, View, open_log, plot_logs, write_report
from dalsegno.analysis.formats import json_lines
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


LINES = (
    '{"kind": "header", "global_step": 0, "note": "eval"}',
    '{"global_step": 1, "loss": 2.0, "note": "the eval is later"}',
    '{"global_step": 1, "loss": 2.0, "note": "eval"}',
    '{"global_step": 1, "loss": 2.0, "note": "\\"kind\\": \\"eval\\""}',
    '{"global_step": 2, "kind": "train", "val_loss": 1.0}',
    '{"global_step": 3, "kind": "eval", "eval_loss": 1.0}',
    '{"global_step": 4, "kind": "\\u0065val", "accuracy": 1.0}',
    '{"global_step": 5, "Val/accuracy": 1.0, "epoch": 1}',
    '{"global_step": 6, "\\u0074est-loss": "NaN"}',
    '{"global_step": 7, "test": 1.0}',
    '{"global_step": 8, "device": "eval"}',
    '{"global_step": 9, "kind": "user", "what": "final"}',
    '{"global_step": 9, "kind": "été", "kind of": "eval"}',
    '{"global_step": 9, "kind": ["eval"], "loss": 1}',
    '{"global_step": 9, "train_runtime": 1.0}',
    '{"global_step": 9, "kind":"final"}',
    '{"global_step": 10, "kind": "eval", "ev',
)
ORDINARY = 500


@pytest.mark.parametrize("ends", ["\n", ",\n", "\r\n"])
def test_the_records_of_a_kind_are_those_of_all_and_the_other_lines_are_not_decoded(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    ordinary = [f'{{"global_step": {step}, "loss": 1.0}}' for step in range(11, 11 + ORDINARY)]
    path.write_text(ends.join([*LINES, *ordinary, '{"global_step": 999, "lo']), encoding="utf-8")
    log = open_log(path)
    everything = list(log.records())
    of_all = str(log.skipped)
    assert {record["kind"] for record in everything} == {"train", "eval", "user", "été", "final"}
    for kind in ("train", "eval", "user", "été", "final", "sync", "ev"):
        assert list(log.records(kind)) == [record for record in everything if record["kind"] == kind]
        assert str(log.skipped) == of_all  # the torn lines
    decoded: list[bytes] = []
    record_in = json_lines.record_in
    monkeypatch.setattr(json_lines, "record_in", lambda line: decoded.append(line) or record_in(line))
    assert len(list(log.records("eval"))) == 5
    assert sum(map(bool, decoded)) <= 2 * len(LINES)
