"""PipelineRunner: runs the micro-batches of a step, or a batch of an evaluation, through all stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dalsegno.distributed import collectives

from . import schedules
from .schedules import Schedule, Stage
from .stage import Forward, StageModule

_KEPT = 16
"""Schedules kept. Each is for one number and shape of micro-batches, and has buffers for their activations."""


class PipelineRunner:
    """Runs this rank's stages.

    Args:
        modules: this rank's stages, by their index.
        count: number of all stages.
        schedule: name of the schedule.
        group: the ranks that have the other stages.
        last: rank in ``group`` that has the last stage.
        copies: the ranks that run the same stages on different data, sharded over them; None: there are none.
        device: of this rank.
    """

    def __init__(
        self,
        modules: Mapping[int, StageModule],
        *,
        count: int,
        schedule: str,
        group: ProcessGroup,
        last: int,
        copies: ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._modules = dict(sorted(modules.items()))
        self._count = count
        self._name = schedule
        self._group = group
        self._last = dist.get_global_rank(group, last)
        self._copies = copies
        self._device = device
        self._schedules: dict[object, Schedule] = {}
        self._factors: Sequence[float | Tensor] = ()

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage."""
        return dist.get_rank() == self._last

    @property
    def modules(self) -> list[StageModule]:
        """This rank's stages."""
        return [*self._modules.values()]

    def check(self, microbatches: int) -> None:
        """
        Raises:
            ConfigurationError: if the schedule cannot run steps of so many micro-batches.
        """
        schedules.check(
            self._name, stages=self._count, ranks=dist.get_world_size(self._group), microbatches=microbatches
        )

    def train(self, batches: Sequence[Any], factors: Sequence[float | Tensor], forward: Forward) -> Tensor:
        """Run forward and backward of all micro-batches. Collective.

        Args:
            batches: micro-batches; the same on all ranks of the pipeline.
            factors: what each one's loss is multiplied by before its backward pass.
            forward: calls the whole model.

        Returns:
            Losses, shape (micro-batches,), on every rank.
        """
        losses: list[Tensor] = []
        for number in self._agreed_runs(batches):
            some = slice(len(losses), len(losses) + number)
            self._factors = factors[some]
            self._run(batches[some], forward, training=True, first=len(losses))
            losses += [self._loss(index) for index in range(number)]
        return self._shared(torch.stack(losses))

    def evaluate(self, batch: Any, forward: Forward) -> tuple[Tensor, Any]:
        """Run a batch forward. Collective. Returns the loss, on every rank, and the outputs on the last stage's."""
        self._factors = [1.0]
        self._run([batch], forward, training=False)
        outputs = next((module.results[0][1] for module in self.modules if module.is_last), None)
        return self._shared(self._loss(0)), outputs

    def share_outputs(self, outputs: Any) -> Any:
        """Return the last stage's outputs on every rank: the tensors and plain values in a tree of mappings, lists and
        tuples, and None in place of all else, such as a cache of which each stage has a part. Collective."""
        leaves, form = tree_flatten(outputs, is_leaf=_is_leaf)
        box: list[Any] = [(form, [_form_of_leaf(leaf) for leaf in leaves])] if self.has_last else [None]
        dist.broadcast_object_list(box, src=self._last, group=self._group)
        form, kinds = box[0]
        shared = []
        for number, kind in enumerate(kinds):
            if isinstance(kind, _TensorForm):
                leaf = leaves[number].detach().contiguous() if self.has_last else kind.empty(self._device)
                dist.broadcast(leaf, src=self._last, group=self._group)
                shared.append(leaf)
            else:
                shared.append(kind)
        return outputs if self.has_last else tree_unflatten(shared, form)

    def _run(self, batches: Sequence[Any], forward: Forward, *, training: bool, first: int = 0) -> None:
        for module in self.modules:
            module.microbatches, module.first, module.forward_of = batches, first, forward
            module.results.clear()
        schedule = self._schedule(batches, training=training)
        indices = torch.arange(len(batches))
        try:
            if training:
                schedule.step(index=indices, target=indices, return_outputs=False)
            else:
                schedule.eval(index=indices, target=indices, return_outputs=False)
        except RuntimeError as error:
            # torch wraps what a stage raises.
            cause = error.__cause__
            if isinstance(cause, Exception) and "failed to run forward" in str(error):
                raise cause from None
            error.add_note(
                "the ranks of a pipeline wait for one another: if another rank failed, its output has the cause"
            )
            raise
        finally:
            for module in self.modules:
                module.microbatches, module.forward_of = (), None

    def _agreed_runs(self, batches: Sequence[Any]) -> list[int]:
        """Lengths of the runs of micro-batches that a schedule can run together.

        Each run reduces gradients, so ranks with different data need the same runs: if on one of them the shapes
        differ, every micro-batch is a run.
        """
        runs = _runs(batches)
        if self._copies is None:
            return runs
        differ = torch.tensor([len(runs) > 1], dtype=torch.int32, device=collectives.communication_device())
        dist.all_reduce(differ, dist.ReduceOp.MAX, group=self._copies)
        return [1] * len(batches) if int(differ) else runs

    def _schedule(self, batches: Sequence[Any], *, training: bool) -> Schedule:
        key = (len(batches), training, _form(batches[0]))
        if key not in self._schedules:
            if len(self._schedules) == _KEPT:
                self._schedules.clear()
            stages = [
                Stage(module, index, self._count, self._device, group=self._group)
                for index, module in self._modules.items()
            ]
            self._schedules[key] = schedules.build(self._name, stages, len(batches), self._scaled)
        return self._schedules[key]

    def _scaled(self, loss: Tensor, index: Tensor) -> Tensor:
        return loss * self._factors[int(index)]

    def _loss(self, index: int) -> Tensor:
        for module in self.modules:
            if module.is_last:
                return module.results[index][0].detach().float()
        return torch.zeros((), device=self._device)

    def _shared(self, values: Tensor) -> Tensor:
        dist.broadcast(values, src=self._last, group=self._group)
        return values


def _runs(batches: Sequence[Any]) -> list[int]:
    """Lengths of the runs of neighbouring micro-batches of equal shapes: a schedule has buffers of one shape."""
    return [len(list(run)) for _, run in groupby(batches, _form)]


def _form(batch: Any) -> tuple[Any, ...]:
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


@dataclass(frozen=True, slots=True)
class _TensorForm:
    """Shape and dtype of a tensor that another rank has."""

    shape: torch.Size
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def _is_leaf(part: Any) -> bool:
    return not isinstance(part, Mapping | list | tuple)


def _form_of_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _TensorForm(leaf.shape, leaf.dtype)
    return leaf if isinstance(leaf, bool | int | float | str) else None
