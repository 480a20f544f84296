"""Where a run lies: one folder, wherever the process goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dalsegno.callbacks import JsonLogger
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
