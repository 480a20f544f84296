"""GradNormLogger, GradHistogram: write norms and histograms of each parameter's gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from dalsegno.callbacks import argument_checks
from dalsegno.callbacks.argument_checks import whole
from dalsegno.callbacks.loggers.json_logger import RecordCallback
from dalsegno.callbacks.loggers.tensorboard import check_rewound, checked_writer
from dalsegno.distributed import accelerator
from dalsegno.distributed.gradients import GradientNorms
from dalsegno.distributed.sharded_tensors import DeviceScalars, gradient_shards, reduced
from dalsegno.events import Event, contexts
from dalsegno.logs.rewind import Position


class GradNormState(TypedDict):
    log: Position | None
    of_step: int
    norms: dict[str, float] | None
    skipped: bool


class GradNormLogger(RecordCallback):
    """Logs the L2 norm of each parameter's gradient at each evaluation, in a separate log, for heatmaps.

    ``norms`` holds those of the clipped, whole gradients (fp32) under the parameters' names, also with
    ``fuse_optim_with_backward``. A tied parameter is included once; a parameter whose gradient the optimizer did not
    use is left out. If the run is stopped during that evaluation, the leg that repeats the evaluation writes the
    record. For a step that the fp16 gradient scaler skipped, the record has ``"skipped": true`` instead.

    Args:
        pattern: a regular expression, searched in parameters' names. Only gradients of matching parameters are measured
            and written; None: all.
        path: of the log, as for :class:`JsonLogger`; None: ``logs/gradient_norms.jsonl``.
        name: the key of its state in checkpoints; None: the class's name.
    """

    state_schema = GradNormState
    only_at_evaluations = True
    optional_events = (Event.STEP_SKIPPED,)

    def __init__(self, pattern: str | None = None, *, path: str | Path | None = None, name: str | None = None) -> None:
        super().__init__("logs/gradient_norms.jsonl", path, name)
        self._measures = (
            None if pattern is None else argument_checks.pattern("GradNormLogger", "pattern", pattern).search
        )
        self._watch: GradientNorms | None = None
        self._norms: DeviceScalars | None = None
        self._of_step = 0
        self._is_skipped = False  # by the gradient scaler

    def on_step_skipped(self, ctx: contexts.Context) -> None:
        self._is_skipped = True

    def on_step_begin(self, ctx: contexts.Context) -> None:
        self._is_skipped = False

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        state = ctx.state
        self._watch = GradientNorms(ctx.model, ctx.optimizer, lambda: state.will_evaluate, self._measures)
        super().on_train_begin(ctx)

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        if ctx.state.will_evaluate and self._watch is not None:
            self._norms, self._of_step = self._watch.take(), ctx.state.global_step

    def on_evaluate(self, ctx: contexts.EvaluateContext) -> None:
        measured, self._norms = self._norms, None
        if self.writing and measured is not None and self._of_step == ctx.state.global_step:
            self.write(ctx, {"skipped": True} if self._is_skipped else {"norms": measured.read()})

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        super().on_train_end(ctx)
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def state_dict(self) -> GradNormState:
        norms = None if self._norms is None else self._norms.read()
        return {"log": super().state_dict(), "of_step": self._of_step, "norms": norms, "skipped": self._is_skipped}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["log"])
        norms, self._of_step = state["norms"], state["of_step"]
        self._is_skipped = state["skipped"]
        self._norms = None if norms is None else DeviceScalars(list(norms), torch.tensor(list(norms.values())))


LOWEST, HIGHEST = -40, 16
"""Exponents of two that bound the bins, one bin per power; the outermost bins include all beyond."""
_BINS = HIGHEST - LOWEST
_COLUMNS = _BINS + 2  # zeros, bins, not finite


class GradHistogram(RecordCallback):
    """Logs a histogram of each parameter's gradient every ``every`` steps, in ``logs/grad_histograms.jsonl``.

    ``counts`` holds, for each parameter with a gradient, the number of its entries in each bin by magnitude: bin ``i``
    is 2^(``lowest`` + i) ≤ |g| < 2^(``lowest`` + i + 1), from ``lowest`` = -40; the first and the last bin include
    smaller and larger entries. ``zeros`` and ``nonfinite`` count entries in no bin. Gradients are whole, reduced,
    unscaled and not clipped.

    Args:
        every: steps between records.
        summary_writer: also gets each histogram, as ``gradients/<parameter>``, over log2 |g|: a logger of a tracker or
            a :class:`ResumableSummaryWriter` that is also among the trainer's callbacks, or any object with torch's
            ``add_histogram_raw``.
    """

    def __init__(self, every: int = 100, summary_writer: Any = None) -> None:
        super().__init__("logs/grad_histograms.jsonl")
        self._every = whole("GradHistogram", "every", every)
        self._writer = checked_writer("GradHistogram", summary_writer, "add_histogram_raw")
        self._names: list[str] = []
        self._counts: Tensor | None = None

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        check_rewound("GradHistogram", self._writer)
        super().on_train_begin(ctx)

    def on_gradients_ready(self, ctx: contexts.Context) -> None:
        if (ctx.state.global_step + 1) % self._every == 0:
            pieces = gradient_shards(ctx.model)
            counts = reduced(pieces, lambda tensors: torch.stack([_histogram(each) for each in tensors]))
            existing = [number for number, piece in enumerate(pieces) if piece.exists]
            self._names, self._counts = [pieces[number].name for number in existing], counts[existing]

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        counts, self._counts = self._counts, None
        if counts is None or not self.writing:
            return
        rows = dict(zip(self._names, counts.long().tolist(), strict=True))
        if self._writer is not None:
            for name, row in rows.items():
                _add_histogram(self._writer, f"gradients/{name}", row[1:-1], ctx.step)
        self.write(
            ctx,
            {
                "lowest": LOWEST,
                "counts": {name: row[1:-1] for name, row in rows.items()},
                "zeros": {name: row[0] for name, row in rows.items()},
                "nonfinite": {name: row[-1] for name, row in rows.items()},
            },
        )


def _add_histogram(writer: Any, tag: str, counts: list[int], step: int) -> None:
    """Add the bins, each between two powers of two, as bins of the exponents; sums as if all were at their middle."""
    middles = [exponent + 0.5 for exponent in range(LOWEST, HIGHEST)]
    writer.add_histogram_raw(
        tag,
        min=LOWEST,
        max=HIGHEST,
        num=sum(counts),
        sum=sum(middle * count for middle, count in zip(middles, counts, strict=True)),
        sum_squares=sum(middle**2 * count for middle, count in zip(middles, counts, strict=True)),
        bucket_limits=[*range(LOWEST + 1, HIGHEST + 1)],
        bucket_counts=counts,
        global_step=step,
    )


def _histogram(tensor: Tensor) -> Tensor:
    """Count zeros, each bin and non-finite entries: shape (_COLUMNS,), float64. Reads exponent bits, in one pass."""
    double = tensor.dtype == torch.float64
    integer, shift, most, bias = (torch.int64, 52, 2047, 1023) if double else (torch.int32, 23, 255, 127)
    values = tensor.reshape(-1) if double else tensor.reshape(-1).float()
    exponents = (values.view(integer) >> shift).bitwise_and_(most)  # 0 of zeros and smaller than normal, most of NaN
    counts = torch.bincount(exponents, minlength=most + 1)
    zeros = values.numel() - values.count_nonzero()
    lowest, highest = bias + LOWEST, bias + HIGHEST - 1
    outermost = counts[: lowest + 1].sum() - zeros, counts[highest:most].sum()
    parts = [zeros[None], outermost[0][None], counts[lowest + 1 : highest], outermost[1][None], counts[most:]]
    return accelerator.wide(torch.cat(parts))
