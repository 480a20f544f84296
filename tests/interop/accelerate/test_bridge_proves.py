"""A resume in a loop around an Accelerator says whether it is exact."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dalsegno.callbacks import JsonLogger
from dalsegno.testing import start_ranks
from interop.accelerate.bridged import loop, loop_until_killed, several
from interop.verdict import Left, Verdict, leave
from support.listeners import Listener
from support.threads import one_thread


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def leave_after(output_dir: Path, step: int, **settings: Any) -> None:
    last = Listener({"on_step_begin": lambda ctx: leave() if ctx.state.global_step == step else None})
    with pytest.raises(Left):
        loop(output_dir, [JsonLogger(), last], **settings)


def resume(output_dir: Path, checkpoint: str, **settings: Any) -> Verdict:
    verdict = Verdict()
    loop(output_dir, [JsonLogger(), verdict], resume=output_dir / checkpoint, **settings)
    return verdict


def test_a_killed_loop_that_resumes_inside_an_epoch_is_proven_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (outcome,) = start_ranks(loop_until_killed, 1, tmp_path, 7).wait(300)
    assert outcome.was_killed
    verdict = Verdict()
    with caplog.at_level(logging.INFO, "dalsegno"):
        loop(tmp_path, [*several(), verdict], resume=tmp_path / "checkpoint-4")
    assert verdict.proof.line in caplog.messages
    assert verdict.proof.line.startswith("resumed exactly: steps 5 to 7 repeated bit for bit")


def test_with_dropout_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    settings = {"save_steps": 5, "max_steps": 10, "dropout": True, "eval_strategy": "no"}
    leave_after(tmp_path, 8, **settings)
    assert resume(tmp_path, "checkpoint-5", **settings).proof.line.startswith("resumed exactly: steps 6 to 8 ")


def test_with_dropout_inside_an_epoch(tmp_path: Path) -> None:
    leave_after(tmp_path, 7, dropout=True)
    verdict = resume(tmp_path, "checkpoint-4", dropout=True)
    assert verdict.found == ("differs", "random numbers", 5)
    assert "a loader's new iterator draws one" in verdict.proof.why


@pytest.mark.parametrize("on_resume", ["warn", "stop", "ignore"])
def test_batches_that_are_not_skipped(tmp_path: Path, on_resume: str, caplog: pytest.LogCaptureFixture) -> None:
    leave_after(tmp_path, 7, logging_steps=100)
    verdict = resume(tmp_path, "checkpoint-4", skips=False, on_resume=on_resume, logging_steps=100)
    assert verdict.proof.verdict == "differs"
    assert verdict.proof.differs_at == 5
    assert "accelerator.skip_first_batches" in verdict.proof.why
    assert (verdict.reason, verdict.ended_at) == (("aborted", 5) if on_resume == "stop" else ("finished", 8))
    assert ("not resumed exactly" in caplog.text) == (on_resume != "ignore")
