"""Where a run is: one folder, whatever directory the process changes to, also on a disk that is full for a while."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.logs import ReadReport, read_records
from support.disks import small_disk
from support.listeners import Listener
from support.small import arguments, small_trainer


def test_another_working_directory_does_not_move_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    away = tmp_path / "away"
    away.mkdir()
    trainer = small_trainer(
        Path("run"), JsonLogger(), Listener({"on_step_begin": lambda _: os.chdir(away)}), max_steps=4, save_steps=2
    )
    result = trainer.train()
    assert not any(away.iterdir())
    assert result.checkpoint == tmp_path / "run/checkpoints/step-00000004"
    names = ["run.json", "logs/train.jsonl", "checkpoints/step-00000002", "checkpoints/step-00000004"]
    assert all((tmp_path / "run" / name).exists() for name in names)
    os.chdir(tmp_path)
    assert small_trainer(Path("run"), max_steps=4).train().reason == "finished"


def test_the_folder_of_a_url_is_where_it_was_when_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = arguments("memory://bucket/run", local_dir="here")  # type: ignore[arg-type]
    os.chdir("/")
    assert (args.directory, args.output_dir) == (tmp_path / "here", "memory://bucket/run")


@pytest.mark.parametrize("frees", [True, False])
def test_a_full_disk_costs_records_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, frees: bool
) -> None:
    """Full while steps 3 to 5 are logged, or until the log is closed. Each record is longer than a disk's block."""
    with small_disk(tmp_path / "disk", kilobytes=256) as disk:
        log, filler = disk / "run/logs/train.jsonl", disk / "filler"

        def fill_or_free(ctx: Any) -> None:
            if ctx.state.global_step == 2:
                with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(512))
            elif ctx.state.global_step == 5 and frees:
                filler.unlink()

        added = Listener(
            {
                "on_step_begin": fill_or_free,
                "on_log_step": lambda ctx: ctx.logs.update(text="x" * 9000),
                "on_train_end": lambda _: filler.unlink(missing_ok=True),
            }
        )
        trainer = small_trainer(disk / "run", JsonLogger(), added, max_steps=8, logging_steps=1)
        assert trainer.train().reason == "finished"
        report = ReadReport()
        steps = [record["global_step"] for record in read_records(log, report) if "kind" not in record]
        assert report.skipped == []
        lost_in_summary = ds.open_log(disk / "run").summary().lost_records
    lost = [3, 4, 5] if frees else [3, 4, 5, 6, 7, 8]
    assert steps == [step for step in range(1, 9) if step not in lost]
    messages = [message for message in caplog.messages if "lost" in message]
    assert messages[0] == (
        f"{log}: the record of step 3 is lost ([Errno 28] No space left on device: '{log}'); training continues"
    )
    count = 3 if frees else 7  # with the final one
    state = "is written again" if frees else "ends incomplete"
    assert messages[1:] == [f"{log} {state}: {count} records are lost, of steps 3 to {lost[-1]}"]
    assert lost_in_summary == count


def test_records_of_a_log_that_is_gone_are_counted(tmp_path: Path) -> None:
    small_trainer(tmp_path, JsonLogger(), max_steps=4, save_steps=2, logging_steps=1).train()
    (tmp_path / "logs/train.jsonl").unlink()
    small_trainer(tmp_path, JsonLogger(), max_steps=6, logging_steps=1).train()
    assert ds.open_log(tmp_path).summary().lost_records == 5, "the header, and those of four steps"
