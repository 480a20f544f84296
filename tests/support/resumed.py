"""Stop a run in this process, continue with a new trainer, and compare it with one that was never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dalsegno as ds
from dalsegno.testing import compare_runs
from support.listeners import Listener

Build = Callable[..., ds.Trainer]
"""``build(output_dir, *callbacks)``: the same trainer each time."""


def stop_after(step: int) -> ds.Callback:
    """Asks for the end when that many steps are finished."""

    def stop(ctx: Any) -> None:
        if ctx.step == step:
            ctx.control.stop("mid-way")

    return Listener({"on_step_end": stop}, name="stopper")


def assert_resumes(build: Build, folder: Path, *stops: int) -> ds.Trainer:
    """The trainer of the last leg, when all has turned out the same. Both runs save only at their end."""
    whole = build(folder / "whole").train()
    for step in stops:
        assert build(folder / "parts", stop_after(step)).train().global_step == step
    last = build(folder / "parts")
    assert last.train().global_step == whole.global_step > max(stops)
    comparison = compare_runs(folder / "whole", folder / "parts")
    assert comparison.identical, f"\n{comparison.table()}"
    return last
