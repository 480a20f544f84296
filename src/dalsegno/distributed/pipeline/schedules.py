"""Torch's pipeline schedules by name, and what each needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from dalsegno.errors import ConfigurationError

from .stage import StageModule

Schedule = PipelineScheduleSingle | PipelineScheduleMulti

_SINGLE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
}


class Stage(PipelineStage):
    """A stage whose shapes are found without a trace."""

    submod: StageModule

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.run.number = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def _compute_outputs(self, *args: Tensor, module: Any, **kwargs: Any) -> Any:
        # Torch calls this method to find the shapes, on activations with any content, before the first real call.
        with self.submod.probing():
            return super()._compute_outputs(*args, module=module, **kwargs)

    def _post_metadata_inference_cleanup(self) -> None:
        # Torch drops the gradients of sharded parameters here, and with them those of the step's earlier micro-batches.
        for part in self.submod.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        gradients = [(each, each.grad) for each in self.submod.parameters()]
        super()._post_metadata_inference_cleanup()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def check(name: str, *, stages: int, ranks: int, microbatches: int) -> None:
    """Check a schedule of ``stages`` stages on ``ranks`` ranks against the number of micro-batches in a step."""
    if not _fits(name, stages, ranks, microbatches):
        fitting = [str(number) for number in range(1, 4 * stages + 1) if _fits(name, stages, ranks, number)]
        raise ConfigurationError(
            f"Pipeline(schedule={name!r}): a step has {microbatches} micro-batches (gradient_accumulation_steps times "
            f"microbatches), which {stages} stages on {ranks} ranks cannot run; {', '.join(fitting)}, … fit"
        )


def _fits(name: str, stages: int, ranks: int, microbatches: int) -> bool:
    if name in ("gpipe", "looped_bfs"):
        return True
    if name == "1f1b":
        return microbatches >= stages
    return microbatches >= ranks and microbatches % (microbatches // ranks) == 0


def build(name: str, stages: Sequence[Stage], microbatches: int) -> Schedule:
    """Build the schedule for this many micro-batches; if it cannot run so few, the one that runs any number."""
    first = stages[0]
    fits = _fits(name, first.num_stages, first.group_size, microbatches)
    if name in _SINGLE:
        return _SINGLE[name if fits else "gpipe"](first, microbatches, loss_fn=_output, scale_grads=False)
    several = _SEVERAL[name if fits else "looped_bfs"]
    return several(list(stages), microbatches, loss_fn=_output, scale_grads=False)


def _output(loss: Tensor, target: Tensor) -> Tensor:
    """Return what the last stage has computed."""
    return loss
