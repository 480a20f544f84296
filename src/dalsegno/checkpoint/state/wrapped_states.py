"""Wrapped states of an optimizer, such as moments in 8 bits. A load needs tensors of the same class to write into.

An optimizer has none before its first step. So that step is taken on a parameter like the real one, which is then
dropped: the class comes from the program, and no method of a library is needed that is not part of every optimizer.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dalsegno.checkpoint.format.composites import is_composite
from dalsegno.checkpoint.format.stored_tensors import StoredTensor
from dalsegno.distributed.rng import preserved_generators

from .contract import Tensors
from .dense import is_shaped_like
from .forms import Form, describe_mismatch
from .wrapped import parts_of

Forms = Mapping[str, Form]
"""Of a parameter's wrapped states, by kind."""

Stored = Mapping[str, StoredTensor]
"""Of a parameter: the saved tensors, by kind; those of wrapped states by the kinds of their parts."""


_OWN_OF_A_TWIN = ("state", "param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def is_wrapped(value: object, parameter: torch.Tensor) -> bool:
    """Whether an optimizer's value that is not dense has an element for each of its parameter's."""
    return isinstance(value, torch.Tensor) and is_shaped_like(value, parameter) and not is_composite(value)


def differences(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, forms: Forms, stored: Stored
) -> Iterator[tuple[str, str]]:
    """How the states that the optimizer creates for a parameter differ from the saved ones, by kind."""
    return _differences(_first_states(optimizer, parameter), forms, stored)


def create(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, forms: Forms, stored: Stored
) -> tuple[dict[str, torch.Tensor], Tensors] | None:
    """States to load into, and their parts, by kind; None if there are :func:`differences`."""
    if not forms:
        return {}, {}
    states = _first_states(optimizer, parameter)
    if any(_differences(states, forms, stored)):
        return None
    created = {kind: states[kind] for kind in forms}
    taken = {kind: parts_of(state, kind).tensors for kind, state in created.items()}
    return created, {f"{kind}{end}": part for kind, parts in taken.items() for end, part in parts.items()}


def _differences(states: Mapping[str, Any], forms: Forms, stored: Stored) -> Iterator[tuple[str, str]]:
    for kind, form in forms.items():
        if not isinstance(states.get(kind), torch.Tensor):
            yield kind, f"saved as {form['class']}, here there is none"
            continue
        parts = parts_of(states[kind], kind)
        if difference := describe_mismatch(form, parts.form):
            yield kind, difference
            continue
        for end, part in parts.tensors.items():
            there = stored[f"{kind}{end}"]
            if (there.shape, there.dtype) != (part.shape, part.dtype):
                yield f"{kind}{end}", f"saved as {[*there.shape]} {there.dtype}, here {[*part.shape]} {part.dtype}"


def _first_states(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """What the optimizer's first step creates for such a parameter, by kind. That step leaves the optimizer and
    random generators as they were, and runs no hooks of the optimizer."""
    probe = nn.Parameter(torch.zeros_like(parameter.detach()))
    probe.grad = torch.zeros_like(probe)
    twin = object.__new__(type(optimizer))
    # copy.copy() leaves out what Optimizer.__getstate__ does.
    vars(twin).update({name: _apart(value) for name, value in vars(optimizer).items() if name not in _OWN_OF_A_TWIN})
    twin.state = defaultdict(dict)
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    twin.param_groups = [
        {name: _apart(value) for name, value in group.items()} | {"params": [probe]}
        for group in optimizer.param_groups
        if any(each is parameter for each in group["params"])
    ]
    step = type(optimizer).step
    with preserved_generators(), torch.compiler.set_stance("force_eager"):  # a compiler takes seconds for a step
        getattr(step, "__wrapped__", step)(twin)  # past the hooks that the user has set on all optimizers
    states: dict[str, Any] = twin.state[probe]
    return states


def _apart(value: Any) -> Any:
    """A copy of what a step may change in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, dict | list | set) else value
