"""ModelFlops: what the model has done since the last record, for the callbacks that tell of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from copy import copy
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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
    StepEndContext,
    TrainBeginContext,
)

from .flops import Uncountable, count_flops
from .peaks import known_peak

logger = logging.getLogger("dalsegno")


class ModelFlops(Callback):
    """What the model does, of all ranks, since the last record: by one definition for all who ask.

    The first step of a leg, in which kernels are chosen and compiled, is left out where the record is of more steps.
    FLOPs are counted from shapes alone (:mod:`dalsegno.callbacks.measures.flops`), those of each rank's first
    micro-batch in the step of the leg's first record, or of each record. The other steps take as many for each token,
    where batches have ``input_ids``, else for each sample. What cannot be counted is said once, and is not guessed.
    """

    name = "model flops"
    makes_wishes = False

    def __init__(self, context: Context) -> None:
        self.rate: float | None = None
        """Model FLOP/s, from on_log_step of a record of training on; None where they cannot be counted."""
        self.token_rate: float | None = None
        """Tokens per second, likewise; None where batches have no ``input_ids``."""
        self.of_a_token = self.of_a_sample = 0.0
        """FLOPs, likewise; 0 where they cannot be counted, or there are no tokens."""
        self._is_wanted = self._counts_each_record = self._has_counted = self._has_warned = False
        self._batch: Any = None  # the newest step's first micro-batch, where it is to be counted
        self._known: dict[Any, int] = {}  # FLOPs by shapes
        self._has_stepped = False
        self._began, self._tokens, self._samples = 0, 0, 0

    def want(
        self, given: float | None, ctx: TrainBeginContext, *, always: bool = False, each_record: bool = False
    ) -> float | None:
        """To be called in on_train_begin, on all ranks: have it counted, if there is a peak to hold it against.

        Args:
            given: the peak of one device, in FLOP/s; None: what is known of it.
            ctx: the handler's.
            always: count without a peak too.
            each_record: count again for each record, so that what follows from it does not hang on where a leg begins;
                shapes that have been counted are remembered.

        Returns:
            The peak of all ranks' devices together, in FLOP/s; None where one is not known.
        """
        own = given or known_peak(device_of(ctx.model), ctx.args)
        (total, known) = collectives.sum_floats([own or 0.0, float(own is not None)], "the peak of the devices")
        is_known = known == collectives.world_size()
        self._is_wanted |= always or is_known
        self._counts_each_record |= each_record
        return total if is_known else None

    def flops(self, tokens: int, samples: int) -> float:
        """What so much has taken, by what is known since on_log_step: of the tokens, where there are any."""
        return self.of_a_token * tokens if self.of_a_token else self.of_a_sample * samples

    def on_train_begin(self, ctx: TrainBeginContext) -> None:  # before those who want it
        self._is_wanted = self._counts_each_record = self._has_counted = self._has_warned = False
        self._batch, self._known, self._has_stepped = None, {}, False
        self.rate = self.token_rate = None
        self.of_a_token = self.of_a_sample = 0.0
        self._begin_interval(ctx)

    def on_rollback(self, ctx: RollbackContext) -> None:
        self._begin_interval(ctx)

    def _begin_interval(self, ctx: Context) -> None:
        self._began = time.perf_counter_ns()
        self._tokens, self._samples = ctx.state.num_input_tokens_seen, ctx.state.samples_seen

    def on_microbatch_begin(self, ctx: MicrobatchBeginContext) -> None:
        if self._is_wanted and ctx.index == 0 and (self._counts_each_record or not self._has_counted):
            self._batch = copy(ctx.batch)

    def on_step_end(self, ctx: StepEndContext) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            if not ctx.state.will_log:
                self._begin_interval(ctx)

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind != "train" or not self._is_wanted:
            return
        # Between two records each rank has an estimate of the tokens, perhaps too high.
        here = [time.perf_counter_ns() - self._began, self._tokens, self._samples]
        nanoseconds, tokens_before, samples_before = collectives.all_reduce_max(here, "ModelFlops")
        if self._counts_each_record or not self._has_counted:
            self._count(ctx)
        tokens = max(0, ctx.state.num_input_tokens_seen - tokens_before)
        samples = ctx.state.samples_seen - samples_before
        done = self.flops(tokens, samples)
        self.rate = done * 1e9 / nanoseconds if done else None
        self.token_rate = tokens * 1e9 / nanoseconds if tokens else None
        self._begin_interval(ctx)

    def _count(self, ctx: Context) -> None:
        """What a token and a sample take, on the average of all ranks; 0 where one cannot count. Collective."""
        told = collectives.gather_floats([float(each) for each in self._of_batch(ctx)], "ModelFlops")
        self._has_counted = True
        flops, tokens, samples = (sum(column) for column in zip(*told, strict=True))
        is_counted = all(each[0] for each in told)
        self.of_a_sample = flops / samples if is_counted else 0.0
        self.of_a_token = flops / tokens if is_counted and all(each[1] for each in told) else 0.0

    def _of_batch(self, ctx: Context) -> tuple[int, int, int]:
        """FLOPs, tokens and samples of this rank's newest first micro-batch; nothing, if it has had none."""
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

    def _flops_of(self, ctx: Context, args: list[Any], kwargs: dict[str, Any]) -> int:
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
