"""The server's files: whenever it is killed, it comes back where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.diloco import delayed_nesterov, nesterov
from dalsegno.diloco.server.files import Version
from dalsegno.diloco.server.run import OuterRun
from dalsegno.errors import StateMismatch
from dalsegno.logs import drop_wall_clock, read_records
from dalsegno.system import filesystem
from dalsegno.testing import start_ranks
from diloco.scenes import play, play_and_die


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [drop_wall_clock(record) for record in read_records(folder / "logs/train.jsonl")]


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    tensors = all(torch.equal(left["tensors"][name], right["tensors"][name]) for name in left["tensors"])
    momentum = all(torch.equal(*both) for both in zip(left["momentum"], right["momentum"], strict=True))
    return tensors and momentum and left["state"] == right["state"]


def test_killed_at_any_operation_it_continues_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, momentum, members, results, and the log; at every eleventh operation on its files."""
    operations: list[str] = []
    monkeypatch.setattr(filesystem, "watcher", lambda what, path: operations.append(what))
    whole = play(tmp_path / "whole")
    monkeypatch.undo()
    assert len(operations) > 100
    for operation in range(2, len(operations), 11):
        folder = tmp_path / str(operation)
        (end,) = start_ranks(play_and_die, 1, folder, operation).wait()
        assert end.exit_code == 9, end.error
        assert equal(play(folder), whole), operation
        assert log_of(folder) == log_of(tmp_path / "whole"), operation
        assert [path.name for path in (folder / "diloco/submissions").iterdir()] == [], operation


def test_the_journal_has_what_no_checkpoint_has(tmp_path: Path) -> None:
    """Between two checkpoints, the parameters come from the journal and the submissions that are kept."""
    whole = play(tmp_path / "whole", versions=7)
    play(tmp_path / "parts", versions=6, save_every=100, save=False)
    assert [path.name for path in (tmp_path / "parts/checkpoints").iterdir()] == ["step-00000000"]
    assert equal(play(tmp_path / "parts", versions=7), whole)


def test_a_damaged_journal_is_not_skipped(tmp_path: Path) -> None:
    play(tmp_path, versions=2)
    journal = tmp_path / "diloco/journal.jsonl"
    journal.write_bytes(b'{"event": 12, "kind": "joi\n{"event": 13, "kind": "left", "worker_id": "w0"}\n')
    with pytest.raises(StateMismatch, match="line 1 is damaged"):
        OuterRun(tmp_path, nesterov(), save_every=2)


def test_a_missing_event_is_noticed(tmp_path: Path) -> None:
    state = play(tmp_path, versions=2)["state"]
    journal = tmp_path / "diloco/journal.jsonl"
    journal.write_text(
        f'{{"event": {state["events"] + 2}, "batch": {state["events"] + 2}, "kind": "left", "worker_id": "w0"}}\n'
    )
    with pytest.raises(StateMismatch, match=f"event {state['events'] + 1} is missing"):
        OuterRun(tmp_path, nesterov(), save_every=2)


@pytest.mark.parametrize("other", [nesterov(0.5), delayed_nesterov(buffer_size=2)], ids=["lr", "class"])
def test_another_outer_optimizer_is_refused(tmp_path: Path, other: Any) -> None:
    play(tmp_path, versions=1)
    with pytest.raises(StateMismatch, match="its outer optimizer is SGD"):
        OuterRun(tmp_path, other, save_every=2)


def test_a_version_that_a_power_cut_shortened_is_written_again(tmp_path: Path) -> None:
    play(tmp_path, versions=3, save=False)
    paths = sorted((tmp_path / "diloco/versions").iterdir())
    whole = [path.read_bytes() for path in paths]
    for path in paths:
        path.write_bytes(b"")
    again = OuterRun(tmp_path, nesterov(), save_every=2)
    file, _ = again.versions.open(Version(3, None if paths[-1].stem.endswith("all") else 0))
    with file:
        assert file.read() == whole[-1]
