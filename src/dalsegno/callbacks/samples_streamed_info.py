"""SamplesStreamedInfo: how much of the data the run has seen."""

from __future__ import annotations

from dalsegno.events.callback import Callback
from dalsegno.events.contexts import LogContext


class SamplesStreamedInfo(Callback):
    """Adds ``samples`` to each record of training and to the final one: the samples seen so far, on all ranks.

    Over all legs of the run, each sample as often as it was used; padding does not count.
    """

    makes_wishes = False

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind in ("train", "final"):
            ctx.logs["samples"] = ctx.state.samples_seen
