"""A run that ends by an error between two steps."""

from __future__ import annotations

from typing import Any

import dalsegno as ds


class Crash(ds.Callback):
    """Raises before the step after ``step``."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, ctx: Any) -> None:
        if ctx.state.global_step == self._step:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
