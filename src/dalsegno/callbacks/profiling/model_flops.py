"""ModelFlops: the model's FLOPs since the last record, and the peaks of devices, for the callbacks that report them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dalsegno.args import TrainingArguments
from dalsegno.callbacks.profiling.flops import Uncountable, count_flops
from dalsegno.data.loader import to_device
from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.collectives import Gathered
from dalsegno.distributed.parallel.base import autocast_dtype
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.events import Binder, Event, FlaglessCallback, contexts
from dalsegno.state import Handler

logger = logging.getLogger("dalsegno")


class ModelFlops(FlaglessCallback):
    """Measures the model's FLOP/s since the last record, on all ranks, for all callbacks of a run.

    A leg's first step, in which kernels are chosen and compiled, is left out if the record covers more steps. FLOPs are
    counted from shapes (:mod:`dalsegno.callbacks.profiling.flops`), of each rank's first micro-batch in the step of the
    leg's first record, or of each record. Other steps count the same per token, where batches have ``input_ids``, else
    per sample. A model that cannot be counted is reported in one warning, and never estimated.
    """

    name = "model flops"

    def __init__(self, context: contexts.Context) -> None:
        self.clock = context.state.clock
        """Of the training, by which rates are measured."""
        self._of_ranks = Gathered(self._measure, "ModelFlops")
        self._reset(context)

    def _reset(self, ctx: contexts.Context) -> None:
        self.rate: float | None = None
        """Model FLOP/s, known from on_log_step of a training record on; None if they cannot be counted."""
        self.token_rate: float | None = None
        """Tokens per second, known likewise; None if batches have no ``input_ids``."""
        self.of_a_token = self.of_a_sample = 0.0
        """FLOPs per token and per sample, known likewise; 0 if they cannot be counted, or there are no tokens."""
        self._is_wanted = self._counts_each_record = self._has_counted = self._has_warned = False
        self._batch: Any = None  # the last step's first micro-batch, if it must be counted
        self._known: dict[Any, int] = {}  # FLOPs by shapes
        self._has_stepped = False
        self._begin_interval(ctx)

    on_train_begin = _reset  # called before the callbacks that request counting

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        binder.gather_for_record(self._of_ranks)
        return super().bound_handlers(binder)

    def want(self, own_peak: float | None, *, always: bool, each_record: bool) -> float | None:
        """Request counting, if the peaks are known or ``always``. Collective; to be called in on_train_begin.

        ``own_peak``: this rank's share of the peak, in FLOP/s. ``each_record``: count again for each record; counts are
        cached by shapes. Returns the sum of all ranks' peaks; None if one is unknown.
        """
        of_rank = [own_peak or 0.0, float(own_peak is not None)]
        (total, known) = collectives.sum_floats(of_rank, "the peak of the devices")
        is_known = known == collectives.world_size()
        self._is_wanted |= always or is_known
        self._counts_each_record |= each_record
        return total if is_known else None

    def flops(self, tokens: int, samples: int) -> float:
        """Return the FLOPs of this much data, by the counts known since on_log_step: per token if there are tokens."""
        return self.of_a_token * tokens if self.of_a_token else self.of_a_sample * samples

    def idle_events(self) -> Collection[Event]:
        return () if self._is_wanted else (Event.MICROBATCH_BEGIN, Event.STEP_END, Event.LOG_STEP)

    def _begin_interval(self, ctx: contexts.Context) -> None:
        self._began = self.clock.seconds()
        self._tokens, self._samples = ctx.state.num_input_tokens_seen, ctx.state.samples_seen

    on_rollback = _begin_interval

    def on_microbatch_begin(self, ctx: contexts.MicrobatchBeginContext) -> None:
        if self._is_wanted and ctx.index == 0 and (self._counts_each_record or not self._has_counted):
            self._batch = copy(ctx.batch)

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            if not ctx.state.will_log:
                self._begin_interval(ctx)

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind != "train" or not self._is_wanted:
            return
        seconds, tokens_before, samples_before = map(max, zip(*self._of_ranks.by_rank(), strict=True))
        if self._counts_each_record or not self._has_counted:
            with self.clock.paused():
                self._count(collectives.gather_floats([*map(float, self._of_batch(ctx))], "ModelFlops"))
        tokens = max(0, ctx.state.num_input_tokens_seen - int(tokens_before))
        done = self.flops(tokens, ctx.state.samples_seen - int(samples_before))
        self.rate = done / seconds if done else None
        self.token_rate = tokens / seconds if tokens else None
        self._begin_interval(ctx)

    def _measure(self) -> list[float]:
        """Seconds since the last record, and what was read before it: each rank's own estimate, maybe too high."""
        return [self.clock.seconds() - self._began, float(self._tokens), float(self._samples)]

    def _count(self, of_ranks: Sequence[Sequence[float]]) -> None:
        """Take each rank's FLOPs, tokens and samples; 0 per token and per sample if a rank cannot count."""
        self._has_counted = True
        flops, tokens, samples = (sum(column) for column in zip(*of_ranks, strict=True))
        is_counted = all(each[0] for each in of_ranks)
        self.of_a_sample = flops / samples if is_counted else 0.0
        self.of_a_token = flops / tokens if is_counted and all(each[1] for each in of_ranks) else 0.0

    def _of_batch(self, ctx: contexts.Context) -> tuple[int, int, int]:
        """Return FLOPs, tokens and samples of the last step's first micro-batch on this rank; zeros if it had none."""
        if self._batch is None:
            return 0, 0, 0
        args, kwargs = _call(ctx.model, to_device(self._batch, device_of(ctx.model)))
        self._batch = None
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim()), None)
        ids = kwargs.get("input_ids")
        tokens = ids.numel() if isinstance(ids, Tensor) else 0
        shapes = tuple((each.shape, each.dtype) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        if shapes not in self._known:
            self._known[shapes] = self._flops_of(ctx, args, kwargs)
        return self._known[shapes], tokens, 1 if first is None else first.shape[0]

    def _flops_of(self, ctx: contexts.Context, args: list[Any], kwargs: dict[str, Any]) -> int:
        try:
            flops = count_flops(ctx.model, args, kwargs, autocast_dtype(bf16=ctx.args.bf16, fp16=ctx.args.fp16))
            if not flops:
                raise Uncountable("it has no matrix products")
        except Uncountable as error:
            if not self._has_warned:
                logger.warning("the model's FLOPs cannot be counted, so records have no mfu: %s", error)
            self._has_warned = True
            return 0
        return flops


def _call(model: nn.Module, batch: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the model's arguments: the batch, without entries that its forward does not take (the loss's targets)."""
    inner = getattr(model, "_orig_mod", model)  # the forward of torch.compile's wrapper takes any arguments
    kinds = {name: each.kind for name, each in signature(inner.forward).parameters.items()}
    if isinstance(batch, Mapping):
        takes_all = Parameter.VAR_KEYWORD in kinds.values()
        return [], {name: each for name, each in batch.items() if takes_all or name in kinds}
    args = list(batch) if isinstance(batch, (tuple, list)) else [batch]
    by_place = [kind for kind in kinds.values() if kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    return (args if Parameter.VAR_POSITIONAL in kinds.values() else args[: len(by_place)]), {}


_H100 = ("H100 80GB HBM3", "H200", "H800", "GH200 480GB", "GH200 144G HBM3e")
_A100 = ("A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe", "A800-SXM4-80GB", "A800 80GB PCIe")

KNOWN_PEAKS: Mapping[str, float] = {
    # NVIDIA's data sheets of each data center product. They give most figures with sparsity, which is twice this.
    "NVIDIA GB300": 2500e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA B300 SXM6 AC": 2250e12,
    "NVIDIA B200": 2250e12,
    **{f"NVIDIA {name}": 989e12 for name in _H100},
    **{f"NVIDIA {name}": 835e12 for name in ("H100 NVL", "H200 NVL")},
    **{f"NVIDIA {name}": 756e12 for name in ("H100 PCIe", "H800 PCIe")},
    "NVIDIA H20": 148e12,
    **{f"NVIDIA {name}": 312e12 for name in _A100},
    "NVIDIA L40S": 362e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L20": 119.5e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A10": 125e12,
    # NVIDIA's white papers of RTX Blackwell, Ada and Ampere GA102, appendix A, "Peak BF16 Tensor TFLOPS with FP32
    # Accumulate": on a GeForce half of those with FP16 accumulate, which PyTorch does not use by default.
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA GeForce RTX 5080": 112.6e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 4080": 97.5e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA RTX 6000 Ada Generation": 364.2e12,
    "NVIDIA RTX A6000": 154.8e12,
    # AMD's data sheets of Instinct accelerators. An MI250X is two devices, each with half of its peak of 383 TFLOP/s.
    "AMD Instinct MI355X": 2516.6e12,
    "AMD Instinct MI325X": 1307.4e12,
    "AMD Instinct MI300X": 1307.4e12,
    "AMD Instinct MI300X OAM": 1307.4e12,
    "AMD Instinct MI250X": 191.5e12,
}
"""By the device's exact name in torch: an L40 is not an L4, an A1000 not an A100, a laptop's RTX 4090 not a desktop's,
a MIG slice not a whole device."""

ONLY_FP16: Mapping[str, float] = {
    "Tesla V100-SXM2-16GB": 125e12,
    "Tesla V100-SXM2-32GB": 125e12,
    "Tesla V100-PCIE-16GB": 112e12,
    "Tesla V100-PCIE-32GB": 112e12,
    "Tesla T4": 65e12,
}
"""Devices without matrix units for bf16."""


def known_peak(device: torch.device, args: TrainingArguments) -> float | None:
    """Return one device's peak FLOP/s in 16-bit matrix products; None if unknown, or if the run is not in 16 bits."""
    if device.type in ("cpu", "meta") or not (args.bf16 or args.fp16):
        return None
    name = accelerator.name_of(device)
    return KNOWN_PEAKS.get(name) or (ONLY_FP16.get(name) if args.fp16 else None)
