"""RateProfiler: samples and tokens per second, in total and of each rank."""

from __future__ import annotations

import time
from typing import Any

from dalsegno.distributed import collectives
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import Context, LogContext, MicrobatchEndContext


class RateProfiler(Callback):
    """Logs samples and tokens per second, in total and of each rank, in each training record:

    - ``samples_per_second``, ``tokens_per_second``: sums over ranks.
    - ``rank_samples_per_second``, ``rank_tokens_per_second``: lists with each rank's rate.

    Tokens are the elements of ``input_ids``; batches without them have no token rates. Padding does not count. Costs
    one small collective per record, and does not wait for the device.
    """

    sets_control_flags = False

    def __init__(self) -> None:
        self._began = 0.0
        self._samples = self._tokens = 0

    def on_train_begin(self, ctx: Context) -> None:
        self._begin()

    on_rollback = on_train_begin

    def on_microbatch_end(self, ctx: MicrobatchEndContext) -> None:
        if ctx.samples:
            self._samples += ctx.samples
            self._tokens += _tokens(ctx)

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind != "train":
            return
        seconds = time.perf_counter() - self._began
        each = collectives.gather_floats([self._samples / seconds, self._tokens / seconds], "RateProfiler")
        counted = ctx.layout.of_data_ranks(each)  # ranks that read the same data do not add to a rate
        for position, name in enumerate(("samples", "tokens")):
            rates = [rates[position] for rates in each]
            if any(rates):
                ctx.logs[f"{name}_per_second"] = sum(rates[position] for rates in counted)
                ctx.logs[f"rank_{name}_per_second"] = rates
        self._begin()

    def _begin(self) -> None:
        self._began, self._samples, self._tokens = time.perf_counter(), 0, 0


def _tokens(ctx: MicrobatchEndContext) -> int:
    ids: Any = ctx.batch.get("input_ids") if hasattr(ctx.batch, "get") else None
    return ids.numel() if hasattr(ids, "numel") else 0
