"""A model's state dict in the form in which a checkpoint contains it: each tensor once, wrapped ones as their parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from dalsegno.checkpoint.format.composites import is_composite
from dalsegno.distributed.sharded_tensors import strip_wrappers
from dalsegno.distributed.stage_places import like_parameter
from dalsegno.stateful.component import State

from .contract import Tensors
from .dense import is_dense
from .forms import Form, Parts, describe_mismatch, ends
from .wrapped import parts_of


class FormMismatch(NamedTuple):
    """A tensor that is wrapped here or in a checkpoint, and otherwise in the other: ``parts`` are the names of its
    plain tensors in both."""

    name: str
    difference: str
    parts: Collection[str]


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """Content of a state dict.

    Attributes:
        tensors: by name, each once: the model's own, which may require gradients.
        tied: further name of a tied tensor to its name in ``tensors``.
        extra: values of ``get_extra_state``, and tensors that are not loaded in place: sparse ones, and torch's own
            quantized ones.
        frozen: names of the tensors that are frozen parameters.
        wrapped: forms of the wrapped tensors, of which ``tensors`` has the parts.
    """

    tensors: Tensors
    tied: dict[str, str]
    extra: dict[str, Any]
    frozen: set[str]
    wrapped: dict[str, Form]

    @classmethod
    def of(cls, raw: Mapping[str, Any], component: str) -> NamedTensors:
        """
        Args:
            raw: a state dict with the parameters themselves.
            component: for errors.

        Raises:
            CannotSave: for a tensor that is neither plain nor can be taken apart; names it.
        """
        found = cls({}, {}, {}, set(), {})
        names: dict[int, str] = {}
        taken_apart: dict[int, Parts] = {}  # keeps the parts alive, whose ids are compared
        for raw_name, value in raw.items():
            name = strip_wrappers(raw_name)
            is_stored_as_it_is = is_dense(value)
            if name.endswith("_extra_state") or (not is_stored_as_it_is and _is_encoded(value)):
                found.extra[name] = value
                continue
            if found.wrapped and not found.wrapped.keys().isdisjoint(_parents(name)):
                continue  # by which the module itself saves the wrapped tensor
            if is_stored_as_it_is:  # nothing is made for it: thousands of objects set off the garbage collector
                found._add(name, value, value, names)
                continue
            if id(value) not in taken_apart:
                taken_apart[id(value)] = parts_of(value, f"{component}.{name}")
            parts, form = taken_apart[id(value)]
            if form is not None:
                found.wrapped[name] = form
            for end, part in parts.items():
                found._add(f"{name}{end}", part, value, names)
        return found

    def _add(self, name: str, part: torch.Tensor, whole: torch.Tensor, names: dict[int, str]) -> None:
        """Add ``part`` of the tensor ``whole``; ``names``: by ``id``, the names of those that were added before."""
        first = names.setdefault(id(part), name)
        if first != name:
            self.tied[name] = first
            return
        self.tensors[name] = part
        if not whole.requires_grad and isinstance(whole, nn.Parameter):
            self.frozen.add(name)

    def detached(self) -> Tensors:
        """The tensors without gradients; they share the model's memory."""
        return {name: like_parameter(each.detach(), each) for name, each in self.tensors.items()}

    def tied_names(self) -> list[list[str]]:
        """Names of each tied tensor; first the name under which it is saved."""
        names: dict[str, list[str]] = {}
        for alias, name in self.tied.items():
            names.setdefault(name, [name]).append(alias)
        return list(names.values())

    def sources(self, there: Collection[str], rest: State) -> dict[str, str]:
        """Stored name of each tensor. One that is tied here may be stored under any of its names only."""
        sources = {name: rest["tied"].get(name, name) for name in (*self.tensors, *self.tied)}
        for names in self.tied_names():
            present = [sources[name] for name in names if sources[name] in there]
            sources |= {name: present[0] for name in names if present and sources[name] not in there}
        return sources

    def mismatches(self, rest: State) -> list[FormMismatch]:
        """Tensors whose saved form is another one."""
        saved: Mapping[str, Form] = rest.get("wrapped", {})
        return [
            FormMismatch(name, difference, {f"{name}{end}" for form in (there, here) for end in ends(form)})
            for name in {**self.wrapped, **saved}
            if (difference := describe_mismatch(there := saved.get(name), here := self.wrapped.get(name)))
        ]


def _is_encoded(value: object) -> bool:
    """Whether the codec takes it, which is neither stored as it is nor taken apart."""
    return not isinstance(value, torch.Tensor) or is_composite(value)


def _parents(name: str) -> Iterator[str]:
    """``a.b`` and ``a`` for ``a.b.c``."""
    while name := name.rpartition(".")[0]:
        yield name
