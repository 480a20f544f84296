"""PipelineRunner: runs the micro-batches of a step, or a batch of an evaluation, through all stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dalsegno.distributed import collectives

from .stage import Forward, StageModule, StageRun

if TYPE_CHECKING:
    from .schedules import Schedule  # imported where a pipeline runs: it imports torch's, which takes a while

_KEPT = 16
"""Schedules kept. Each is for one number and shape of micro-batches, and has buffers for their activations."""


class PipelineRunner:
    """Runs this rank's stages, which are in ``modules`` by their index, of ``count`` stages.

    Args:
        group: the ranks that have the other stages.
        last: rank in ``group`` that has the last stage.
        copies: the ranks that run the same stages on different data, sharded over them; None: there are none.
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

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage."""
        return dist.get_rank() == self._last

    @property
    def modules(self) -> list[StageModule]:
        return [*self._modules.values()]

    def check(self, microbatches: int) -> None:
        """Whether the schedule can run steps of so many micro-batches."""
        from . import schedules

        schedules.check(
            self._name, stages=self._count, ranks=dist.get_world_size(self._group), microbatches=microbatches
        )

    def train(self, batches: Sequence[Any], factors: Sequence[float | Tensor], forward: Forward) -> Tensor:
        """Run forward and backward of all micro-batches, the same on all ranks of the pipeline. Collective.

        ``factors``: what each one's loss is multiplied by before its backward pass. Returns the losses, shape
        (micro-batches,), of the last stage; zeros on the ranks that do not have it.
        """
        losses: list[Tensor] = []
        for run in self._plan(batches, training=True):
            first, number = len(losses), len(run.batches)
            self._run(run, forward, factors[first : first + number], first)
            losses += [self._loss(index) for index in range(number)]
        return torch.stack(losses)

    def evaluate(self, batch: Any, forward: Forward) -> tuple[Tensor, Any]:
        """Run a batch forward. Collective. Returns the loss, on every rank, and the outputs on the last stage's."""
        (run,) = self._plan([batch], training=False)
        self._run(run, forward)
        outputs = next((module.run.results[0][1] for module in self.modules if module.is_last), None)
        return self.share(self._loss(0)), outputs

    def share(self, losses: Tensor) -> Tensor:
        """Return the last stage's ``losses`` on every rank. Collective."""
        shared = losses.clone()
        dist.broadcast(shared, src=self._last, group=self._group)
        return shared

    def share_outputs(self, outputs: Any) -> Any:
        """Return the last stage's outputs on every rank: the tensors and plain values in a tree of mappings, lists and
        tuples, and None in place of all else, such as a cache of which each stage has a part. Collective."""
        leaves, form = tree_flatten(outputs, is_leaf=lambda part: not isinstance(part, Mapping | list | tuple))
        box: list[Any] = [(form, [_form_of_leaf(leaf) for leaf in leaves])] if self.has_last else [None]
        dist.broadcast_object_list(box, src=self._last, group=self._group)
        form, kinds = box[0]
        shared = []
        for number, kind in enumerate(kinds):
            if isinstance(kind, _TensorForm):
                if self.has_last:
                    leaf = leaves[number].detach().contiguous()
                else:
                    leaf = torch.empty(kind.shape, dtype=kind.dtype, device=self._device)
                dist.broadcast(leaf, src=self._last, group=self._group)
                shared.append(leaf)
            else:
                shared.append(kind)
        return outputs if self.has_last else tree_unflatten(shared, form)

    def _run(self, run: _Run, forward: Forward, factors: Sequence[float | Tensor] = (), first: int = 0) -> None:
        for module in self.modules:
            module.run = StageRun(forward, run.batches, factors, first)
        schedule = self._schedule(run)
        unused = torch.empty(len(run.batches))  # the last stage computes the loss; torch wants a target to split
        try:
            if run.kind.training:
                schedule.step(target=unused, return_outputs=False)
            else:
                schedule.eval(target=unused, return_outputs=False)
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
                module.run = StageRun(results=module.run.results)

    def _plan(self, batches: Sequence[Any], *, training: bool) -> list[_Run]:
        """Split a step's micro-batches into runs. Collective.

        Ranks that run the same stages on different data gather parameters and reduce gradients together. Each run
        reduces gradients, so they need the same runs: if on one of them the shapes differ, every micro-batch is a run.
        A new schedule calls each stage once more, to find the shapes, and so gathers the parameters: if one of the
        ranks needs one for a run, all build one.
        """
        if len(self._schedules) > _KEPT:  # not during a step: what the ranks have agreed on has to last
            self._schedules.clear()
        forms = [_form(batch) for batch in batches]
        kinds = [_Kind(form, len([*some]), training) for form, some in groupby(forms)]
        new = self._are_new(kinds)
        if self._copies is not None:
            together, single = _Kind(forms[0], len(forms), training), [_Kind(form, 1, training) for form in forms]
            own = [len(kinds) > 1, *self._are_new([together]), *self._are_new(single)]
            differ, is_new, *are_new = self._on_any(own)
            kinds, new = (single, are_new) if differ else ([together], [is_new])
        rest = iter(batches)
        return [_Run([*islice(rest, kind.number)], kind, is_new) for kind, is_new in zip(kinds, new, strict=True)]

    def _are_new(self, kinds: Sequence[_Kind]) -> list[bool]:
        return [kind not in self._schedules and kind not in kinds[:number] for number, kind in enumerate(kinds)]

    def _on_any(self, flags: Sequence[bool]) -> list[bool]:
        """Whether each of the flags is set on any of the ranks that run the same stages on different data."""
        shared = torch.tensor(flags, dtype=torch.int32, device=collectives.communication_device())
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._copies)
        return [bool(flag) for flag in shared.tolist()]

    def _schedule(self, run: _Run) -> Schedule:
        if run.is_new:
            from . import schedules

            stages = [
                schedules.Stage(module, index, self._count, self._device, group=self._group)
                for index, module in self._modules.items()
            ]
            self._schedules[run.kind] = schedules.build(self._name, stages, len(run.batches))
        return self._schedules[run.kind]

    def _loss(self, index: int) -> Tensor:
        for module in self.modules:
            if module.is_last:
                return module.run.results[index][0].float()
        return torch.zeros((), device=self._device)


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring micro-batches of equal shapes, which a schedule runs together: its buffers have one shape."""

    batches: Sequence[Any]
    kind: _Kind
    is_new: bool
    """Whether a schedule is built for it."""


class _Kind(NamedTuple):
    """Runs of one kind can have the same schedule."""

    form: tuple[Any, ...]
    """Of each micro-batch."""
    number: int
    """Of micro-batches."""
    training: bool


def _form(batch: Any) -> tuple[Any, ...]:
    """Shapes and dtypes of a batch's tensors, in their containers."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, (dict, Mapping)):  # dict first: Mapping takes 1 µs
        return tuple(map(_form, batch.values()))
    if isinstance(batch, (list, tuple)):
        return tuple(map(_form, batch))
    return tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


class _TensorForm(NamedTuple):
    """Of a tensor that another rank has."""

    shape: torch.Size
    dtype: torch.dtype


def _form_of_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _TensorForm(leaf.shape, leaf.dtype)
    return leaf if isinstance(leaf, bool | int | float | str) else None
