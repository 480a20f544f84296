"""An optimizer's state by kind: one entry for a scalar that each of thousands of parameters has, such as ``step``.

::

    {"scalars": [{"kind": "step", "names": ["weight", "bias"], "values": tensor([7., 7.]), "on_cpu": False}],
     "sharded": {"exp_avg": ["weight", "bias"]}, "state": {}, "on_cpu": {}}

``sharded`` names the parameters whose state of a kind is among the sharded tensors. Of a wrapped state, such as moments
in 8 bits, each part is a kind (``exp_avg.codes``), and ``wrapped`` has its form by parameter and kind. ``strides`` and
``tied`` have those of sharded tensors that do not lie in memory as their parameter, or are another one. ``state``
and ``on_cpu`` have, by parameter name, everything else, such as a step counter that parameters share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dalsegno.checkpoint.format.layout import is_plain
from dalsegno.stateful.component import State

from .forms import Form, ends


@dataclass(frozen=True, slots=True)
class OptimizerRows:
    """An optimizer's state by parameter name."""

    plain: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values by kind, for each parameter that has a state, even an empty one."""
    sharded: dict[str, list[str]] = field(default_factory=dict)
    """Kinds that are sharded tensors."""
    on_cpu: dict[str, list[str]] = field(default_factory=dict)
    """Kinds that are on the CPU while the parameter is not."""
    wrapped: dict[str, dict[str, Form]] = field(default_factory=dict)
    """Forms of the kinds that are wrapped tensors, whose parts are sharded."""
    strides: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Strides of the kinds that are sharded tensors with others than their parameter."""
    tied: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)
    """Kinds that are the same tensor as one that comes before them, with its parameter and kind."""

    def parts(self, name: str) -> list[str]:
        """Kinds of the parts of a parameter's wrapped states: ``exp_avg.codes``."""
        return [f"{kind}{end}" for kind, form in self.wrapped.get(name, {}).items() for end in ends(form)]

    def whole(self, name: str) -> list[str]:
        """Kinds of a parameter that are sharded tensors themselves."""
        parts = {*self.parts(name)}
        return [kind for kind in self.sharded.get(name, ()) if kind not in parts]

    def by_kind(self) -> State:
        """Convert to the form in checkpoints."""
        columns: dict[tuple[Any, ...], tuple[list[str], list[torch.Tensor]]] = {}
        plain: dict[str, dict[str, Any]] = {}
        on_cpu: dict[str, list[str]] = {}
        ids = [id(value) for values in self.plain.values() for value in values.values()]
        shared = {each for each, count in Counter(ids).items() if count > 1} if len({*ids}) < len(ids) else ()
        for name, values in self.plain.items():
            if not values and name not in self.sharded:
                plain[name] = {}
            for kind, value in values.items():
                is_on_cpu = kind in self.on_cpu.get(name, ())
                if _is_scalar(value) and (not shared or id(value) not in shared):
                    names, scalars = columns.setdefault((kind, is_on_cpu, value.dtype, value.device), ([], []))
                    names.append(name)
                    scalars.append(value)
                    continue
                plain.setdefault(name, {})[kind] = value
                if is_on_cpu:
                    on_cpu.setdefault(name, []).append(kind)
        sharded: dict[str, list[str]] = {}
        for name, kinds in self.sharded.items():
            for kind in kinds:
                sharded.setdefault(kind, []).append(name)
        return {
            "scalars": [
                {"kind": kind, "names": names, "values": torch.stack(scalars), "on_cpu": is_on_cpu}
                for (kind, is_on_cpu, *_), (names, scalars) in columns.items()
            ],
            "sharded": sharded,
            "state": plain,
            "on_cpu": on_cpu,
            **{kind: each for kind in ("wrapped", "strides", "tied") if (each := getattr(self, kind))},
        }

    @classmethod
    def of(cls, saved: State) -> OptimizerRows:
        """Convert from the form in checkpoints."""
        rows = cls(
            _copied(saved["state"], dict),
            on_cpu=_copied(saved["on_cpu"], list),
            **{kind: _copied(saved.get(kind, {}), dict) for kind in ("wrapped", "strides", "tied")},
        )
        for column in saved["scalars"]:
            kind = column["kind"]
            for name, value in zip(column["names"], column["values"], strict=True):
                rows.plain.setdefault(name, {})[kind] = value.clone()
                if column["on_cpu"]:
                    rows.on_cpu.setdefault(name, []).append(kind)
        for kind, names in saved["sharded"].items():
            for name in names:
                rows.plain.setdefault(name, {})
                rows.sharded.setdefault(name, []).append(kind)
        return rows


def _is_scalar(value: object) -> bool:
    return type(value) is torch.Tensor and value.dim() == 0 and is_plain(value)


def _copied(by_name: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    return {name: kind(values) for name, values in by_name.items()}
