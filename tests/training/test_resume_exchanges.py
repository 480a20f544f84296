"""What the ranks exchange from the beginning of train() to the first step of a leg that resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.testing import run_ranks
from support.exchanges import Exchanges
from support.small import small_trainer

MOST = 20


class FirstStep(ds.Callback):
    """Closes the count at the first step."""

    def __init__(self, exchanges: Exchanges) -> None:
        self.exchanges = exchanges
        self.counted: int | None = None

    def on_step_begin(self, ctx: ds.StepContext) -> None:
        if self.counted is None:
            self.counted = self.exchanges.counts.total()


def exchanges_until_the_first_step(output_dir: Path, parallel: Any) -> list[int | None]:
    """Of the first leg, and of one that resumes from its checkpoint."""
    counted = []
    for steps in (2, 4):
        first = FirstStep(exchanges := Exchanges())
        trainer = small_trainer(output_dir, first, max_steps=steps, save_steps=2, parallel=parallel)
        with exchanges:
            trainer.train()
        counted.append(first.counted)
    return counted


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_resume_makes_few_exchanges(tmp_path: Path, parallel: str) -> None:
    for _, resumed in run_ranks(exchanges_until_the_first_step, 2, tmp_path, parallel):
        assert resumed is not None
        assert resumed <= MOST
