"""Build the train step and the evaluations, for the way in which the model is spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from dalsegno.args import TrainingArguments
from dalsegno.data import EvalLoader
from dalsegno.data.step_batch import LossWeight
from dalsegno.distributed.modes import parts_of_batch
from dalsegno.distributed.parallel import FusedBackward, Pipelined
from dalsegno.distributed.parallel.base import Parallel
from dalsegno.distributed.precision import autocast_dtype
from dalsegno.errors import ConfigurationError
from dalsegno.events.table import Event
from dalsegno.stateful.component import Stateful

from .accumulation import Accumulation, MicrobatchAccumulation, PipelinedAccumulation
from .evaluation import LossEvaluation
from .forward import EvaluationForward, ForwardPass, PipelinedForward
from .grad_scaler import grad_scaler
from .parts import RunParts
from .placement import PlacedModel
from .step import GradNormDemand, TrainStep

_UNSUPPORTED_IF_FUSED = dict.fromkeys(
    [Event.GRADIENTS_READY, Event.PRE_OPTIMIZER_STEP],
    "fuse_optim_with_backward=True cannot fire, since not all gradients exist at any one time; remove one of the two",
)
_UNSUPPORTED_IF_PIPELINED = dict.fromkeys(
    [Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD],
    "a pipeline cannot fire: no rank runs the whole forward or backward pass of a micro-batch, and the passes of "
    "several micro-batches alternate; use on_microbatch_end, or another parallel mode",
)


def unsupported_events(args: TrainingArguments, parallel: Parallel) -> dict[Event, str]:
    """The events that this run cannot fire, each with the reason and the remedy."""
    if isinstance(parallel, Pipelined):
        return _UNSUPPORTED_IF_PIPELINED
    return _UNSUPPORTED_IF_FUSED if args.fuse_optim_with_backward else {}


MakeEvaluation = Callable[[str, str, EvalLoader], LossEvaluation]
"""``(name, prefix, loader)``"""


def build_step(
    parts: RunParts, placed: PlacedModel, loss_weight: LossWeight | None, affected: Sequence[Stateful] = ()
) -> tuple[TrainStep, MakeEvaluation]:
    """``affected``: objects whose state an evaluation may change.

    Raises:
        ConfigurationError: for settings that the parallel mode does not support.
    """
    args, device, parallel = parts.args, placed.device, placed.parallel
    wants_norm = GradNormDemand(parts)
    if isinstance(parallel, Pipelined):
        _expect_pipelinable(args, parallel)
    if args.fuse_optim_with_backward:
        parallel = FusedBackward(parallel, parts.model, parts.optimizer, wants_norm)
    forward = ForwardPass(
        parts.dispatcher,
        parallel.module,
        placed.loss_fn,
        device,
        autocast_dtype(bf16=args.bf16, fp16=args.fp16),
        is_compiled=args.torch_compile,
    )
    scaler = grad_scaler(placed.layout, device) if args.fp16 else None
    accumulate: Accumulation[Parallel]
    evaluated: EvaluationForward = forward
    data_size = parts.layout.data_size
    if isinstance(parallel, Pipelined):
        accumulate = PipelinedAccumulation(parts.dispatcher, forward, parallel, data_size, scaler, device)
        evaluated = PipelinedForward(parts.dispatcher, forward, parallel.runner)
    else:
        accumulate = MicrobatchAccumulation(parts.dispatcher, forward, parallel, data_size, scaler, device)
    evaluation = partial(
        LossEvaluation, parts=parts, forward=evaluated, device=device, loss_weight=loss_weight, affected=affected
    )
    return TrainStep(parts, accumulate, parallel, wants_norm, scaler=scaler), evaluation


def _expect_pipelinable(args: TrainingArguments, parallel: Pipelined) -> None:
    parts = parts_of_batch(args.parallel)
    for accumulated in sorted({*args.accumulation.values.values()}):
        parallel.runner.check(accumulated * parts)
    for name in ("torch_compile", "fuse_optim_with_backward"):
        if getattr(args, name):
            raise ConfigurationError(
                f"{name}=True does not work with parallel={args.parallel}: no rank has the whole model; set it to False"
            )
