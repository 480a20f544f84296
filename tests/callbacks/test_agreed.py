"""Whatever callback ends a run, on whichever rank it finds the reason: all ranks end at one step, for one reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from callbacks.layouts import layout_trainer
from dalsegno.callbacks import CheckLoss, DivergenceDetector, EarlyStopping, NaNChecker
from dalsegno.distributed import collectives
from dalsegno.testing import run_ranks
from support.listeners import Listener

Outcome = tuple[int, str, str | None, str | None]


def on_rank_one(handler: str, act: Callable[[Any], None]) -> ds.Callback:
    """Does something there alone."""
    return Listener({handler: lambda ctx: act(ctx) if collectives.rank() == 1 else None}, name="mischief")


def breaks_its_loss() -> ds.Callback:
    def act(ctx: Any) -> None:
        if ctx.state.global_step + 1 == 3:
            ctx.outputs["loss"] = ctx.outputs["loss"] * math.nan

    return on_rank_one("on_before_backward", act)


def logs_of_its_own(kind: str, name: str, value: float) -> ds.Callback:
    """What a callback that has not been reduced over the ranks puts into the logs of one of them."""

    def act(ctx: Any) -> None:
        if ctx.kind == kind and ctx.state.global_step >= 3:
            ctx.logs[name] = value

    return on_rank_one("on_log_step", act)


def the_same_everywhere(kind: str, name: str) -> ds.Callback:
    def add(ctx: Any) -> None:
        if ctx.kind == kind:
            ctx.logs[name] = 1.0 / (1 + ctx.state.global_step)  # better at each step

    return Listener({"on_log_step": add}, name="steady")


CASES: dict[str, Callable[[], list[ds.Callback]]] = {
    "CheckLoss": lambda: [breaks_its_loss(), CheckLoss()],
    "NaNChecker": lambda: [breaks_its_loss(), NaNChecker()],
    "DivergenceDetector": lambda: [
        the_same_everywhere("train", "health"),
        logs_of_its_own("train", "health", math.inf),
        DivergenceDetector(metric_key="health"),
    ],
    "EarlyStopping": lambda: [
        the_same_everywhere("eval", "eval_score"),
        logs_of_its_own("eval", "eval_score", 9.0),
        EarlyStopping("score", patience=2),
    ],
}


def train(output_dir: Path, layout: str, case: str) -> Outcome:
    trainer = layout_trainer(output_dir, layout, CASES[case](), eval_steps=1, max_steps=8)
    result = trainer.train()
    return result.global_step, result.reason, result.why, result.stopped_by


@pytest.mark.parametrize(
    ("case", "layout", "expected"),
    [
        ("CheckLoss", "fsdp", (4, "aborted", "the loss is nan in micro-batch 0 (from 0) of step 3 on rank 1")),
        ("NaNChecker", "ddp", (4, "aborted", "first in step 3, on rank 1")),
        ("NaNChecker", "fsdp", (4, "aborted", "first in step 3, on rank 1")),
        ("DivergenceDetector", "ddp", (4, "aborted", "health diverged at step 4")),
        ("EarlyStopping", "ddp", (4, "stopped", "eval_score was best at step 2")),
    ],
)
def test_all_ranks_end_at_one_step(tmp_path: Path, case: str, layout: str, expected: tuple[int, str, str]) -> None:
    one, other = run_ranks(train, 2, tmp_path, layout, case)
    step, reason, why = expected
    assert one == other
    assert (one[0], one[1], one[3]) == (step, reason, case)
    assert why in (one[2] or "")
    assert (tmp_path / "checkpoints").exists() == (reason == "stopped")
