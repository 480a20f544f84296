"""StageModule: runs one stage of a model, by the model's own forward.

Each rank of a pipeline reads the same batch and calls the whole model on it. Modules of other stages are replaced while
it runs: those before the stage return :class:`Missing`, the stage's first module gets the activation that the stage
before has sent, and at the next stage's first module the forward ends: its input is what this stage sends. So masks,
positions and the like, which the forward computes between the modules, need not be sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from dalsegno.distributed.pipeline.cut import Cut
from dalsegno.distributed.rng import preserved_generators
from dalsegno.errors import ConfigurationError

_INDEPENDENT = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor",
}  # fmt: skip


class Missing(Tensor):
    """A tensor of NaN. What is computed from it is missing too, so a stage that would use it is found, not wrong."""

    @classmethod
    def like(cls, tensor: Tensor) -> Missing:
        """Return one of the shape, dtype and device of ``tensor``; takes the memory of one number."""
        value = tensor.new_full((), torch.nan) if tensor.is_floating_point() else tensor.new_zeros(())
        return value.expand(tensor.shape).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        is_independent = getattr(func, "__name__", "") in _INDEPENDENT
        return result.as_subclass(Tensor) if is_independent and isinstance(result, cls) else result


def has_missing(part: Any) -> bool:
    """Whether there is one in a tree of containers."""
    if isinstance(part, Tensor):
        return isinstance(part, Missing)
    if isinstance(part, (dict, Mapping)):  # dict first: Mapping takes 1 µs
        return any(map(has_missing, part.values()))
    if isinstance(part, (list, tuple)):
        return any(map(has_missing, part))
    return any(isinstance(leaf, Missing) for leaf in tree_leaves(part))  # containers that torch knows, such as caches


Forward = Callable[[Any], tuple[Tensor, Any]]
"""Calls the whole model on a batch; returns the loss and the outputs."""

_running: int | None = None


def running_microbatch() -> int | None:
    """The index, in its step, of the micro-batch whose forward pass a stage of this rank is in; else None. For hooks of
    modules: the passes of a pipeline's micro-batches alternate, between the events of all of them."""
    return _running


@dataclass(slots=True)
class StageRun:
    """What a stage runs, and how far it is. (A module's own attributes take microseconds to set.)"""

    forward: Forward | None = None
    """Calls the whole model."""
    microbatches: Sequence[Any] = ()
    """Of equal shapes."""
    factors: Sequence[float | Tensor] = ()
    """Of their losses, in training."""
    first: int = 0
    """Index, in its step, of the first of them."""
    results: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)
    """Of the last stage: loss and outputs of each micro-batch that was run."""
    number: int = 0
    """Index of the present micro-batch."""
    is_inside: bool = False
    """Whether the forward pass has reached the stage's first module."""
    received: Tensor | None = None
    """The activation from the stage before."""
    missing: Missing | None = None
    """Stands for activations before the stage: one for all of them, since nothing can write to it."""


class StageModule(nn.Module):
    """The stage ``index`` of a cut. Its parameters are those of the stage, under other names than in the model."""

    def __init__(self, cut: Cut, index: int) -> None:
        super().__init__()
        self.is_last = index == len(cut.stages) - 1
        self.units = nn.ModuleList(cut.stages[index].values())
        self.run = StageRun()
        """Set by the runner."""
        self._index = index
        self._is_probe = False
        self._substitutes = [
            (*_parent_and_key(cut.model, name), self._substitute(stage, name, module, cut))
            for stage, modules in enumerate(cut.stages)
            for name, module in modules.items()
            if stage != index or (index > 0 and name == cut.entry(index))
        ]
        self._called = [*cut.model.modules()]  # those above the stages, too: the forward runs from the root
        self._own_hooks: dict[nn.Module, tuple[set[int], set[int]]] = {}

    def note_hooks(self) -> None:
        """Note that the hooks which the modules have now, such as those of FSDP, belong to the model."""
        self._own_hooks = {module: ({*module._forward_pre_hooks}, {*module._forward_hooks}) for module in self._called}

    def forward(self, *received: Tensor) -> Tensor:
        """The activation for the next stage, from that of the stage before; of the last stage the loss times its
        factor, 0-dim."""
        global _running
        run = self.run
        _running = run.first + run.number
        try:
            loss_and_outputs = self._call(run, received[0] if received else None)
        finally:
            _running = None
        if isinstance(loss_and_outputs, Tensor):
            return loss_and_outputs
        loss, outputs = loss_and_outputs
        if not self._is_probe:
            # In training, outputs are not kept: those of all micro-batches may take more memory than a stage.
            run.results[run.number] = loss.detach(), None if torch.is_grad_enabled() else outputs
        return loss * run.factors[run.number] if run.factors else loss

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Around a call that only finds shapes: it leaves random generators and buffers as they were, and calls only
        the hooks that :meth:`note_hooks` has seen, not those of callbacks."""
        buffers = [(module, dict(module._buffers)) for module in self._called]
        hooks = {module: (module._forward_pre_hooks, module._forward_hooks) for module in self._called}
        self._is_probe = True
        try:
            for module, (before, after) in hooks.items():
                own = self._own_hooks.get(module, (set(), set()))
                module._forward_pre_hooks = OrderedDict((key, each) for key, each in before.items() if key in own[0])
                module._forward_hooks = OrderedDict((key, each) for key, each in after.items() if key in own[1])
            for module, present in buffers:  # copies: the backward pass, which follows, still reads what it was given
                module._buffers.update({key: each if each is None else each.clone() for key, each in present.items()})
            with preserved_generators():
                yield
        finally:
            self._is_probe = False
            for module, (before, after) in hooks.items():
                module._forward_pre_hooks, module._forward_hooks = before, after
            for module, present in buffers:
                module._buffers.update(present)

    def _call(self, run: StageRun, received: Tensor | None) -> Tensor | tuple[Tensor, Any]:
        """Call the model on the present micro-batch. Returns the activation; of the last stage the loss and outputs."""
        assert run.forward is not None, "the runner sets it"
        run.is_inside, run.received = self._index == 0, received
        originals = [parent._modules[key] for parent, key, _ in self._substitutes]
        for parent, key, substitute in self._substitutes:
            parent._modules[key] = substitute
        try:
            result: Any = run.forward(run.microbatches[run.number])
        except _StageEnd as end:
            if self.is_last:
                raise
            result = end.activation
        else:
            if not self.is_last:
                raise ConfigurationError(
                    f"Pipeline: the forward ended without calling the first module of stage {self._index + 1}; name "
                    "one that it calls"
                )
        finally:
            run.received = None
            for (parent, key, _), original in zip(self._substitutes, originals, strict=True):
                parent._modules[key] = original
        if not run.is_inside:
            raise ConfigurationError(f"Pipeline: the forward did not call the first module of stage {self._index}")
        if self._index and has_missing(result):
            raise ConfigurationError(
                f"Pipeline: stage {self._index} uses a value that an earlier stage computes, beside the activation "
                "that enters its first module (a connection that skips the boundary); begin the stage elsewhere, or "
                "pass that value on in the activation"
            )
        return result  # type: ignore[no-any-return]

    def _substitute(self, stage: int, name: str, module: nn.Module, cut: Cut) -> nn.Module:
        if stage == self._index:
            return _Entry(self, module)
        if stage == self._index + 1 and name == cut.entry(stage):
            return _Exit(self, module)
        return _Absent(self, module, f"Pipeline: stage {self._index} calls {name}, which is in stage {stage}")


class _StageEnd(BaseException):
    """Ends the forward at the stage's end. Not an Exception, so that the model does not catch it."""

    def __init__(self, activation: Tensor) -> None:
        super().__init__()
        self.activation = activation


class _Substitute(nn.Module):
    """Takes a module's place in its parent; has the module's attributes."""

    def __init__(self, stage: StageModule, module: nn.Module, complaint: str = "") -> None:
        super().__init__()
        self.__dict__.update(_stage=stage, _module=module, _complaint=complaint)  # not as submodules

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


class _Entry(_Substitute):
    """The stage's first module: gets the received activation in place of the one that is missing."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run: StageRun = self._stage.run
        if not run.is_inside:
            run.is_inside = True
            position, key, _ = _activation(args, kwargs)
            if key is None:
                args = (*args[:position], run.received, *args[position + 1 :])
            else:
                kwargs[key] = run.received
        return self._module(*args, **kwargs)


class _Exit(_Substitute):
    """The next stage's first module: its input is this stage's result."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _StageEnd(_activation(args, kwargs)[2])


class _Absent(_Substitute):
    """A module of another stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run: StageRun = self._stage.run
        if run.is_inside or run.received is None:
            raise ConfigurationError(
                f"{self._complaint}; list the modules of each stage in the order in which the forward calls them"
            )
        if run.missing is None:
            run.missing = Missing.like(run.received)
        return run.missing


def _activation(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, str | None, Tensor]:
    """Position or keyword of the first tensor among the arguments of a stage's first module, and the tensor."""
    named: list[tuple[int, str | None, Any]] = [(position, None, value) for position, value in enumerate(args)]
    for position, key, value in [*named, *((-1, key, value) for key, value in kwargs.items())]:
        if isinstance(value, DTensor):
            raise ConfigurationError(
                "Pipeline: a stage's first module is called with a DTensor, and stages send plain tensors; let the "
                "module before it return one (use_local_output=True in its style), or begin the stage elsewhere"
            )
        if isinstance(value, Tensor):
            return position, key, value
    raise ConfigurationError("Pipeline: a stage's first module is called without a tensor; begin the stage elsewhere")


def _parent_and_key(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, key = name.rpartition(".")
    return model.get_submodule(parent), key
