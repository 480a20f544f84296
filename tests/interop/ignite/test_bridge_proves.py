"""A resume of an Ignite Engine says whether it is exact."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from dalsegno.callbacks import JsonLogger
from dalsegno.testing import start_ranks, tiny_regression_data
from interop.ignite.bridged import Script, run_until_killed, several
from interop.verdict import Left, Verdict, leave
from support.threads import one_thread


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def test_a_killed_run_that_resumes_at_the_end_of_an_epoch_is_proven_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (outcome,) = start_ranks(run_until_killed, 1, tmp_path, 13).wait(300)
    assert outcome.was_killed
    verdict = Verdict()
    with caplog.at_level(logging.INFO, "dalsegno"):
        Script(tmp_path, [*several(), verdict]).load("checkpoint_10.pt").run()
    assert verdict.proof.line in caplog.messages
    assert verdict.proof.line.startswith("resumed exactly: steps 11 to 13 repeated bit for bit")


def test_an_order_from_random_numbers_is_said(tmp_path: Path) -> None:
    def loader() -> DataLoader[object]:
        return DataLoader(tiny_regression_data(20), batch_size=4, shuffle=True)

    with pytest.raises(Left):
        Script(tmp_path, [JsonLogger()]).at(8, leave).run(loader=loader())
    verdict = Verdict()
    Script(tmp_path, [JsonLogger(), verdict], on_resume="stop").load("checkpoint_5.pt").run(loader=loader())
    assert (verdict.found, verdict.reason, verdict.ended_at) == (("differs", "data", 6), "aborted", 6)
    assert "Ignite restores neither" in verdict.proof.why
