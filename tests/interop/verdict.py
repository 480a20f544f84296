"""What a leg knows about its resume at its end."""

from __future__ import annotations

from typing import Any

import dalsegno as ds


class Verdict(ds.Callback):
    proof: Any = None
    reason = ""
    ended_at = 0

    def on_train_end(self, ctx: Any) -> None:
        self.proof, self.reason, self.ended_at = ctx.state.resume_proof, ctx.reason, ctx.state.global_step

    @property
    def found(self) -> tuple[str, str | None, int | None]:
        return self.proof.verdict, self.proof.what, self.proof.differs_at


class Left(Exception):
    """Training was left in the middle."""


def leave(*_: Any) -> None:
    raise Left
