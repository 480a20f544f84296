"""A save that ends some steps later than it begins, whatever the disk does."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from dalsegno.system import filesystem

from .listeners import Listener


def hold_save(monkeypatch: pytest.MonkeyPatch, step: int, *, until: int) -> Listener:
    """A callback with which the checkpoint of ``step`` is not published before step ``until`` has ended.

    It waits in on_step_end of that step until the checkpoint is there; on_save then fires in the same step.
    """
    go_on = threading.Event()

    def hold(operation: str, path: Path) -> None:
        if operation == "write" and path.parent.name == f"step-{step:08d}.partial" and path.name == "manifest.json":
            assert go_on.wait(60)

    def release(ctx: Any) -> None:
        if ctx.step == until:
            go_on.set()
            for thread in threading.enumerate():
                if thread.name == f"dalsegno-save-{step}":
                    thread.join(60)

    monkeypatch.setattr(filesystem, "watcher", hold)
    return Listener({"on_step_end": release}, name="holder")
