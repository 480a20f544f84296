"""SamplesStreamedInfo: the number of samples that the run has trained on."""

from __future__ import annotations

from dalsegno.events.callback import Callback
from dalsegno.events.contexts import LogContext


class SamplesStreamedInfo(Callback):
    """Logs ``samples``, the samples trained on so far on all ranks, in each training record and the final one.

    Counts over all legs of the run, each sample as often as it was used. Padding does not count.
    """

    sets_control_flags = False

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind in ("train", "final"):
            ctx.logs["samples"] = ctx.state.samples_seen
