"""ModelFlops: what the model has done since the last record, for the callbacks that tell of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn

from dalsegno.data.device import to_device
from dalsegno.distributed import collectives
from dalsegno.distributed.precision import autocast_dtype
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import (
    Context,
    LogContext,
    MicrobatchBeginContext,
    RollbackContext,
    TrainBeginContext,
)

from .flops import Uncountable, count_flops
from .peaks import known_peak

logger = logging.getLogger("dalsegno")


class ModelFlops(Callback):
    """FLOPs of all ranks per second since the last record, by one definition for all who ask.

    Counted once a leg (:mod:`dalsegno.callbacks.measures.flops`), for the shapes of each rank's first micro-batch. More
    steps take as many for each token, where batches have ``input_ids``, else for each sample. What cannot be counted is
    said once, and is not guessed.
    """

    name = "model flops"
    makes_wishes = False

    def __init__(self, context: Context) -> None:
        self.rate: float | None = None
        """Model FLOP/s of all ranks, from on_log_step of a record of training on."""
        self._is_wanted = False
        self._counted: tuple[int, int, int] | None = None  # FLOPs, tokens and samples of this rank's micro-batch
        self._per_token = self._per_sample = 0.0
        self._is_settled = False
        self._began, self._tokens, self._samples = 0, 0, 0

    def want(self, given: float | None, ctx: TrainBeginContext, *, always: bool = False) -> float | None:
        """To be called in on_train_begin, on all ranks: have it counted, if there is a peak to hold it against.

        Args:
            given: the peak of one device, in FLOP/s; None: what is known of it.
            ctx: the handler's.
            always: count without a peak too.

        Returns:
            The peak of all ranks' devices together, in FLOP/s; None where one is not known.
        """
        own = given or known_peak(device_of(ctx.model), ctx.args)
        (total, known) = collectives.sum_floats([own or 0.0, float(own is not None)], "the peak of the devices")
        is_known = known == collectives.world_size()
        self._is_wanted |= always or is_known
        return total if is_known else None

    def on_train_begin(self, ctx: TrainBeginContext) -> None:  # before those who want it
        self._is_wanted = self._is_settled = False
        self._counted, self.rate = None, None
        self._begin_interval(ctx)

    def on_rollback(self, ctx: RollbackContext) -> None:
        self._begin_interval(ctx)

    def _begin_interval(self, ctx: Context) -> None:
        self._began = time.perf_counter_ns()
        self._tokens, self._samples = ctx.state.num_input_tokens_seen, ctx.state.samples_seen

    def on_microbatch_begin(self, ctx: MicrobatchBeginContext) -> None:
        if not self._is_wanted or self._counted is not None:
            return
        args, kwargs = _call(ctx.model, to_device(ctx.batch, device_of(ctx.model)))
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim()), None)
        ids = kwargs.get("input_ids")
        try:
            flops = count_flops(ctx.model, args, kwargs, autocast_dtype(bf16=ctx.args.bf16, fp16=ctx.args.fp16))
            if not flops:
                raise Uncountable("it has no matrix products")
        except Uncountable as error:
            flops = 0
            logger.warning("the model's FLOPs cannot be counted, so records have no mfu: %s", error)
        tokens = ids.numel() if isinstance(ids, Tensor) else 0
        self._counted = flops, tokens, 1 if first is None else first.shape[0]

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind != "train" or not self._is_wanted:
            return
        if not self._is_settled:
            self._settle()
        (nanoseconds,) = collectives.all_reduce_max([time.perf_counter_ns() - self._began], "ModelFlops")
        # Where a leg begins between two records, the tokens that it begins with are an estimate, perhaps too high.
        tokens = max(0, ctx.state.num_input_tokens_seen - self._tokens)
        samples = ctx.state.samples_seen - self._samples
        done = self._per_token * tokens if self._per_token else self._per_sample * samples
        self.rate = done * 1e9 / nanoseconds if self._per_sample else None
        self._begin_interval(ctx)

    def _settle(self) -> None:
        """What a token and a sample take, on the average of all ranks. Not at all, where one has not been counted."""
        flops, tokens, samples = self._counted or (0, 0, 0)
        told = collectives.gather_floats([float(flops), float(tokens), float(samples)], "ModelFlops")
        self._is_settled = True
        total, all_tokens, all_samples = (sum(column) for column in zip(*told, strict=True))
        is_counted = all(each[0] for each in told)
        self._per_sample = total / all_samples if is_counted else 0.0
        self._per_token = total / all_tokens if is_counted and all(each[1] for each in told) else 0.0


def _call(model: nn.Module, batch: Any) -> tuple[list[Any], dict[str, Any]]:
    """What the model is called with: the batch, or as much of it as its forward takes, the rest being its loss's."""
    kinds = {name: each.kind for name, each in signature(_compiled_from(model).forward).parameters.items()}
    if isinstance(batch, Mapping):
        takes_all = Parameter.VAR_KEYWORD in kinds.values()
        return [], {name: each for name, each in batch.items() if takes_all or name in kinds}
    args = list(batch) if isinstance(batch, (tuple, list)) else [batch]
    by_place = [kind for kind in kinds.values() if kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    return (args if Parameter.VAR_POSITIONAL in kinds.values() else args[: len(by_place)]), {}


def _compiled_from(model: nn.Module) -> nn.Module:
    inner = getattr(model, "_orig_mod", model)  # torch.compile's own forward takes whatever it is given
    return inner if isinstance(inner, nn.Module) else model
