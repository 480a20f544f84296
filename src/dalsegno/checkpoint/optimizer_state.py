"""An optimizer as a component of a checkpoint: its state by the FQNs of the model's parameters, sharded as they are.

So the state is found at any world size and in any order of parameter groups. Scalars and hyperparameters go through the
codec, by kind: one entry for a scalar that each of thousands of parameters has, such as ``step``::

    {"scalars": [{"kind": "step", "names": ["weight", "bias"], "values": tensor([7., 7.]), "on_cpu": False}],
     "sharded": {"exp_avg": ["weight", "bias"]}, "state": {}, "on_cpu": {}}

``sharded`` names the parameters whose state of a kind is among the sharded tensors. Of a wrapped state, such as moments
in 8 bits, each part is a kind (``exp_avg.codes``), and ``wrapped`` has its spec by parameter and kind. ``strides`` and
``tied`` have those of sharded tensors that do not lie in memory as their parameter, or are another one. ``state``
and ``on_cpu`` have, by parameter name, everything else, such as a step counter that parameters share.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

from dalsegno.checkpoint.contract import Captured, LoadTarget, Tensors
from dalsegno.checkpoint.index import Index, StoredTensor
from dalsegno.checkpoint.model_state import unwrapped
from dalsegno.checkpoint.names import LOSS, MODEL
from dalsegno.checkpoint.optimizer_schema import check_optimizer_rest
from dalsegno.checkpoint.tensor_files import is_dense, is_plain
from dalsegno.checkpoint.wrapped import WrapperSpec, create_states, ends, parts_of
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import strip_wrappers
from dalsegno.distributed.stage_places import is_cut, is_on_other_stage, like_parameter
from dalsegno.errors import CannotSave, StateMismatch
from dalsegno.stateful.component import State, class_name_of


@dataclass(frozen=True, slots=True)
class OptimizerRows:
    plain: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values by kind, for each parameter that has a state, even an empty one."""
    sharded: dict[str, list[str]] = field(default_factory=dict)
    """Kinds that are sharded tensors."""
    on_cpu: dict[str, list[str]] = field(default_factory=dict)
    """Kinds that are on the CPU while the parameter is not."""
    wrapped: dict[str, dict[str, WrapperSpec]] = field(default_factory=dict)
    """Specs of the kinds that are wrapped tensors, whose parts are sharded."""
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


def of_all_stages(
    named: Sequence[tuple[str, torch.Tensor]], tensors: Tensors, rows: OptimizerRows
) -> tuple[Tensors, OptimizerRows]:
    """Complete the state with that of other stages, so that all ranks have the same names, in the optimizer's order of
    ``named``; their tensors have no data. Collective."""
    shapes = {key: (tuple(each.shape), each.dtype) for key, each in tensors.items()}
    on_host = replace(rows, plain={name: _on_host(values) for name, values in rows.plain.items()})
    of_all = OptimizerRows()
    shapes_of_all: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for its_shapes, its_state in collectives.gather((shapes, on_host.by_kind()), "an optimizer's state"):
        of_rank = OptimizerRows.of(its_state)
        new = of_rank.plain.keys() - of_all.plain.keys()  # a tied parameter has equal state on each of its stages
        for part in fields(OptimizerRows):
            its = getattr(of_rank, part.name)
            getattr(of_all, part.name).update({name: its[name] for name in its if name in new})
        shapes_of_all = its_shapes | shapes_of_all
    ordered = [(name, parameter) for name, parameter in named if name in of_all.plain]
    complete = {
        key: tensors[key]
        if key in tensors
        else like_parameter(torch.empty(shapes_of_all[key][0], dtype=shapes_of_all[key][1], device="meta"), parameter)
        for name, parameter in ordered
        for kind in of_all.sharded.get(name, ())
        if (key := f"{name}.{kind}")
    }
    return complete, replace(of_all, plain={name: of_all.plain[name] for name, _ in ordered})


def _on_host(values: dict[str, object]) -> dict[str, object]:
    return {kind: value.cpu() if isinstance(value, torch.Tensor) else value for kind, value in values.items()}


# --- the component ---------------------------------------------------------------------------------------------------

Groups = Sequence[Sequence[torch.Tensor]]
"""The parameters of each group of the optimizer."""


class _Numbered(NamedTuple):
    number: int
    parameter: torch.Tensor
    fqn: str


class OptimizerState:
    """The state of any torch optimizer, by parameter name.

    If a parameter has another dtype than when it was saved, state of the former dtype is cast with it, since the
    foreach kernels of most optimizers refuse mixed dtypes. State of a dtype of its own (float32 moments of bfloat16
    weights) keeps it.

    State of its parameter's shape, or a DTensor, is sharded like the parameter; other state (step counters, factored
    moments, histories) is the same on every rank and goes into the rest, with the groups' hyperparameters.

    Args:
        model: the model whose parameters the optimizer updates, for their names.
        optimizer: may have no state yet; loading creates it without a step.
        loss_fn: a module with parameters that the optimizer updates too.
        others: names of further parameters that it updates, by ``id``; they contain a slash. Those without a name have
            that of their position.
    """

    key = "optimizer"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: nn.Module | None = None,
        others: Mapping[int, str] | None = None,
    ) -> None:
        self._model = unwrapped(model)
        self._loss_fn = loss_fn
        self._others = others or {}
        self.optimizer: torch.optim.Optimizer = optimizer
        self._creatable: set[tuple[str, type, str]] = set()  # class of a state, of its parameter, and kind
        self._built = len(optimizer.param_groups)  # the others have been added by the training

    @property
    def class_name(self) -> str:
        return class_name_of(self.optimizer)

    def capture(self) -> Captured:
        packed = self.optimizer.state_dict()
        if not {"state", "param_groups"} <= packed.keys():
            raise CannotSave(
                f"{self.key}: the state_dict of {self.class_name} has {', '.join(map(str, packed))}, and needs "
                "state and param_groups, as torch's have"
            )
        named = [each for group in self._named(self._present()) for each in group]
        tensors: Tensors = {}
        rows = OptimizerRows()
        for number, (name, parameter) in enumerate(named):  # this order, independent of which was updated first
            if number not in packed["state"]:
                continue
            plain, usual = rows.plain.setdefault(name, {}), parameter.stride()
            for kind, value in packed["state"][number].items():
                is_sharded = isinstance(value, torch.Tensor) and _is_shaped_like(value, parameter)
                if is_sharded and is_dense(value):
                    tensors[f"{name}.{kind}"] = like_parameter(value, parameter)
                    rows.sharded.setdefault(name, []).append(kind)
                    if type(value) is not DTensor and value.stride() != usual:
                        rows.strides.setdefault(name, {})[kind] = [*value.stride()]
                    continue
                if is_sharded:
                    parts, spec = parts_of(value, f"{self.key}.{name}.{kind}")
                    for end, part in parts.items():
                        tensors[f"{name}.{kind}{end}"] = like_parameter(part.detach(), parameter)
                        rows.sharded.setdefault(name, []).append(f"{kind}{end}")
                    if spec is not None:
                        self._expect_creatable(name, parameter, kind, spec, parts)
                        rows.wrapped.setdefault(name, {})[kind] = spec
                    continue
                plain[kind] = value
                if isinstance(value, torch.Tensor) and value.is_cpu and not parameter.is_cpu:
                    rows.on_cpu.setdefault(name, []).append(kind)
        if len({*map(id, tensors.values())}) < len(tensors):
            _tie(rows, tensors)
        if is_cut(self._model):
            tensors, rows = of_all_stages(named, tensors, rows)
        rest = {
            **rows.by_kind(),
            "other": {key: value for key, value in packed["state"].items() if key not in range(len(named))},
            **({"further": further} if (further := _further(packed)) else {}),
            **({"built": self._built} if self._built < len(packed["param_groups"]) else {}),
            "groups": [
                {**group, "params": [named[number][0] for number in group["params"]]}
                for group in packed["param_groups"]
            ],
        }
        return Captured(tensors, rest)

    def _expect_creatable(
        self, name: str, parameter: torch.Tensor, kind: str, spec: WrapperSpec, parts: Tensors
    ) -> None:
        """A checkpoint with a state that no resume can create would be refused only by the next leg."""
        key = spec["class"], type(parameter), kind
        if key in self._creatable:
            return
        saved = {f"{kind}{end}": part for end, part in parts.items()}
        *_, lines = create_states(self.optimizer, parameter, {kind: spec}, saved)
        if lines:
            raise CannotSave(
                f"{self.key}.{name}.{kind}: no resume could create this state, a {spec['class']}, of "
                f"{self.class_name}: only those of torchao.optim, or of their weight's class; keep plain tensors in it"
            )
        self._creatable.add(key)

    def check_rest(self, stored: Index, rest: State, where: str) -> None:
        check_optimizer_rest(rest, self.optimizer, where)
        loaded = self._loaded(rest)
        groups = [[name for name, _ in group] for group in self._named(loaded, rest)]
        _check_order(rest, groups, sum(each.numel() for group in loaded for each in group), where)

    def differences(self, stored: Index, rest: State, *, any_dtype: bool = False) -> list[str]:
        groups = [[name for name, _ in group] for group in self._named(self._loaded(rest), rest)]
        saved = [group["params"] for group in rest["groups"]]
        lines = []
        if len(groups) != len(saved):
            lines.append(f"{len(saved)} parameter groups in the checkpoint, {len(groups)} here")
        for number, (ours, theirs) in enumerate(zip(groups, saved, strict=False)):
            lines += [f"group {number}, missing in the checkpoint: {name}" for name in {*ours} - {*theirs}]
            lines += [f"group {number}, unexpected in the checkpoint: {name}" for name in {*theirs} - {*ours}]
        rows, own = OptimizerRows.of(rest), stored.of(self.key)
        wanted = {f"{name}.{kind}" for name, kinds in rows.sharded.items() for kind in kinds}
        wanted |= {f"{name}.{kind}" for name in rows.wrapped for kind in rows.parts(name)}
        lines += [f"listed, but its tensor is missing: {name}" for name in wanted - own.keys()]
        lines += [f"tensor that is not listed: {name}" for name in own.keys() - wanted]
        if are_positional(saved) and not lines:
            parameters = dict(each for group in self._named(self._loaded(rest), rest) for each in group)
            lines += _other_shapes(parameters, own, rows.sharded)
        if rows.wrapped and not lines:
            fitting = self._fitting(stored, rest, rows)
            for name in (each for each in fitting if each in rows.wrapped):
                parts = {kind: own[f"{name}.{kind}"] for kind in rows.parts(name)}
                *_, found = create_states(self.optimizer, fitting[name].parameter, rows.wrapped[name], parts)
                lines += [f"{name}.{line}" for line in found]
        return sorted(lines)

    def prepare(self, stored: Index, rest: State) -> LoadTarget:
        rows, own = OptimizerRows.of(rest), stored.of(self.key)
        weights = _weights(stored)
        fitting = self._fitting(stored, rest, rows)
        casts = {  # parameters whose dtype has changed
            name: (weights[fqn].dtype, parameter.dtype)
            for name, (_, parameter, fqn) in fitting.items()
            if fqn in weights and weights[fqn].dtype != parameter.dtype
        }
        states: dict[str, Tensors] = {}
        tensors: Tensors = {}
        for name, (_, parameter, _) in [*fitting.items()]:
            saved_parts = {kind: own[f"{name}.{kind}"] for kind in rows.parts(name)}
            states[name], parts, lines = create_states(
                self.optimizer, parameter, rows.wrapped.get(name, {}), saved_parts
            )
            if lines:  # the user allows it to be dropped
                del fitting[name], states[name]
                continue
            tensors |= {f"{name}.{kind}": each for kind, each in parts.items()}
            tied, strides = rows.tied.get(name, {}), rows.strides.get(name, {})
            for kind in rows.whole(name):
                other, its_kind = tied.get(kind, (name, kind))
                if (same := states.get(other, {}).get(its_kind)) is not None:
                    states[name][kind] = same
                    continue
                saved = own[f"{name}.{kind}"]
                states[name][kind] = tensors[f"{name}.{kind}"] = like(
                    parameter, saved, casts.get(name), strides.get(kind)
                )

        def commit() -> None:
            saved = {
                name: {kind: cast_as(value, casts.get(name)) for kind, value in rows.plain[name].items()} | states[name]
                for name in fitting
            }
            state = {fitting[name].number: values for name, values in saved.items()} | rest["other"]
            self._set_groups(self._loaded(rest), rest["groups"])
            packed = {"state": state, "param_groups": self._groups(rest["groups"])}
            here, moved = _further(self.optimizer.state_dict()), Moved()
            self.optimizer.load_state_dict(packed | here | exactly(rest.get("further", {}), here, moved))
            # Undo load_state_dict's casts to the parameter's dtype and its mangling of strings.
            for name, values in saved.items():
                own = self.optimizer.state[fitting[name].parameter]
                for kind, value in values.items():
                    is_on_cpu = kind in rows.on_cpu.get(name, ())
                    own[kind] = value if is_on_cpu else exactly(value, own.get(kind), moved)

        return LoadTarget(tensors, commit)

    def _fitting(self, stored: Index, rest: State, rows: OptimizerRows) -> dict[str, _Numbered]:
        """By stored name, the parameters with a stored state. That of one whose shape has changed is dropped."""
        loaded = self._loaded(rest)
        named = [each for group in self._named(loaded, rest) for each in group]
        fqns = [name for group in self._named(loaded) for name, _ in group]
        weights = _weights(stored)
        return {
            name: _Numbered(number, parameter, fqn)
            for number, ((name, parameter), fqn) in enumerate(zip(named, fqns, strict=True))
            if name in rows.plain
            and (fqn not in weights or weights[fqn].shape == parameter.shape)
            and not is_on_other_stage(parameter)
        }

    def _groups(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups with the saved hyperparameters, or the present ones if the number of groups has changed."""
        own, position, groups = self.optimizer.param_groups, itertools.count(), []
        for group, here in zip(saved if len(saved) == len(own) else own, own, strict=True):
            placed = dict(group)
            for key, value in group.items():  # one that is a tensor, such as the learning rate
                if isinstance(value, torch.Tensor) and isinstance(here.get(key), torch.Tensor):
                    placed[key] = value.to(here[key].device)
            names = {"param_names": here["param_names"]} if "param_names" in here else {}
            groups.append(here | placed | names | {"params": [next(position) for _ in here["params"]]})
        return groups

    def _present(self) -> Groups:
        return [group["params"] for group in self.optimizer.param_groups]

    def _loaded(self, saved: State) -> Groups:
        """The parameters of each group once the stored rest is loaded: with the groups that training had added by then,
        without those that it has added here."""
        groups, names = self._present(), [group["params"] for group in saved["groups"]]
        if self._built <= len(names) < len(groups):
            return groups[: len(names)]
        if saved.get("built", len(names)) <= len(groups) < len(names):
            parameters = {name: each for each, name in self._parameters()}
            taken = {id(each) for group in groups for each in group}
            added = [[parameters.get(name) for name in group] for group in names[len(groups) :]]
            if all(each is not None and id(each) not in taken for group in added for each in group):
                return [*groups, *added]  # type: ignore[list-item]
        return groups

    def _set_groups(self, groups: Groups, saved: list[dict[str, Any]]) -> None:
        own = self.optimizer.param_groups
        for parameter in (each for group in own[len(groups) :] for each in group["params"]):
            self.optimizer.state.pop(parameter, None)
        del own[len(groups) :]
        for number in range(len(own), len(groups)):
            self.optimizer.add_param_group({**saved[number], "params": groups[number]})

    def _parameters(self) -> Iterator[tuple[torch.Tensor, str]]:
        yield from ((each, strip_wrappers(name)) for name, each in self._model.named_parameters())
        for name, each in () if self._loss_fn is None else self._loss_fn.named_parameters():
            yield each, _of_loss(strip_wrappers(name))

    def _named(self, groups: Groups, saved: State = None) -> list[list[tuple[str, torch.Tensor]]]:
        """Name and parameter of each group, in the order in which the optimizer's ``state_dict`` numbers them; by
        position if the stored rest ``saved`` names all so."""
        names: dict[int, str] = {}
        stored = [] if saved is None else [group["params"] for group in saved["groups"]]
        if not are_positional(stored):
            for each, name in self._parameters():
                names.setdefault(id(each), name)
            names = {**self._others, **names}
        return [
            [(names.get(id(each), positional_name(number, position)), each) for position, each in enumerate(group)]
            for number, group in enumerate(groups)
        ]


def _tie(rows: OptimizerRows, tensors: Tensors) -> None:
    """Name in ``rows`` the kinds that are the same of ``tensors`` as one before."""
    first: dict[int, tuple[str, str]] = {}
    for name, kinds in rows.sharded.items():
        for kind in kinds:
            other = first.setdefault(id(tensors[f"{name}.{kind}"]), (name, kind))
            if other != (name, kind):
                rows.tied.setdefault(name, {})[kind] = other


def _is_shaped_like(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Tells at once that a step counter is not sharded like its parameter."""
    return isinstance(value, DTensor) or (value.dim() > 0 and value.shape == parameter.shape)


def _further(packed: dict[str, Any]) -> dict[str, Any]:
    """What the optimizer's own ``state_dict`` adds to torch's, such as the slow weights of Lookahead."""
    return {key: value for key, value in packed.items() if key not in ("state", "param_groups")}


def _weights(stored: Index) -> dict[str, StoredTensor]:
    """The stored tensors of model and loss function, by the names of their parameters here."""
    return {**stored.of(MODEL), **{_of_loss(name): each for name, each in stored.of(LOSS).items()}}


def _of_loss(name: str) -> str:
    """A name that no parameter of the model has, since those contain no slash."""
    return f"{LOSS}/{name}"


Cast = tuple[torch.dtype, torch.dtype]
"""From dtype, to dtype."""

Moved = dict[tuple[int, torch.device], torch.Tensor]
"""Tensors on a device, by the ``id`` of the saved one."""


def like(
    parameter: torch.Tensor, stored: StoredTensor, cast: Cast | None, strides: Sequence[int] | None = None
) -> torch.Tensor:
    """An empty tensor to load ``stored`` into; sharded like ``parameter`` if the shapes are equal, else replicated.
    ``strides``: of the saved tensor, if they were not its parameter's."""
    dtype = cast[1] if cast is not None and stored.dtype == cast[0] else stored.dtype
    if strides is not None and not isinstance(parameter, DTensor):
        return torch.empty_strided(stored.shape, strides, dtype=dtype, device=parameter.device)
    if parameter.shape == stored.shape:
        return torch.empty_like(parameter, dtype=dtype).detach()
    local = torch.empty(stored.shape, dtype=dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return local
    mesh = parameter.device_mesh
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def cast_as(value: Any, cast: Cast | None) -> Any:
    """Cast a tensor of its parameter's former dtype to the new one. Scalars, such as step counters, keep theirs."""
    if cast is None or not isinstance(value, torch.Tensor) or value.dim() == 0 or value.dtype != cast[0]:
        return value
    return value.to(cast[1])


def exactly(saved: Any, loaded: Any, moved: Moved) -> Any:
    """``saved``, unconverted, on the device where ``load_state_dict`` put it. ``moved``: what each tensor became, which
    it is under all of its names."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return moved.setdefault((id(saved), loaded.device), saved.to(loaded.device))
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: exactly(value, loaded.get(key), moved) for key, value in saved.items()}
    if isinstance(saved, list | tuple) and isinstance(loaded, list | tuple) and len(saved) == len(loaded):
        return type(saved)([exactly(*pair, moved) for pair in zip(saved, loaded, strict=True)])
    return saved


_TWO = (optim.Adam, optim.NAdam, optim.RAdam, optim.Adamax)  # AdamW is an Adam


def tensors_per_parameter(optimizer: optim.Optimizer) -> int | None:
    """Number of tensors of a parameter's size that the first step creates for each; None if that is not known."""
    groups = optimizer.param_groups
    if isinstance(optimizer, _TWO):
        return 3 if any(group.get("amsgrad") for group in groups) else 2
    if isinstance(optimizer, optim.SGD):
        return 1 if any(group["momentum"] for group in groups) else 0
    return None


# --- names by position ----------------------------------------------------------------------------------------------
# torch numbers the parameters of an optimizer in the order of its groups. Other programs save only these numbers, so an
# imported checkpoint has such names until a run resumes from it, whose optimizer determines which parameter each is.


def positional_name(group: int, position: int) -> str:
    return f"group[{group}].params[{position}]"


def are_positional(groups: Sequence[Sequence[str]]) -> bool:
    """Whether each name in each group is that of its position."""
    return any(groups) and all(
        name == positional_name(number, position)
        for number, names in enumerate(groups)
        for position, name in enumerate(names)
    )


def _check_order(rest: State, groups: Sequence[Sequence[str]], elements: int, where: str) -> None:
    """Raises StateMismatch if a group has its parameters in another order than when it was saved, and the optimizer
    keeps state by their positions: lists in its groups, or a tensor over all ``elements`` in a row, as LBFGS."""
    changed = [
        (number, ours, group["params"])
        for number, (ours, group) in enumerate(zip(groups, rest["groups"], strict=False))
        if [*ours] != group["params"] and {*ours} == {*group["params"]}
    ]
    kept = next(_by_position(rest, elements), None) if changed else None
    if kept is None:
        return
    number, ours, theirs = changed[0]
    place = next(place for place, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
    raise StateMismatch(
        f"{where}: group {number} has its parameters in another order: number {place} was {theirs[place]}, here it is "
        f"{ours[place]}. {kept} is by position and would belong to other parameters; build the optimizer with its "
        "parameters in the saved order"
    )


def _by_position(rest: State, elements: int) -> Iterator[str]:
    """Places of state that belongs to no single parameter by its name."""
    for number, group in enumerate(rest["groups"]):
        for key, value in group.items():
            is_row = isinstance(value, list) and len(value) == len(group["params"])
            if key not in ("params", "param_names") and (is_row or any(_sizes(value))):
                yield f"groups[{number}][{key!r}]"
    yield from (f"state_dict[{key!r}]" for key in rest.get("further", ()))
    yield from (f"state[{key!r}]" for key, value in rest["other"].items() if any(_sizes(value)))
    for name, values in rest["state"].items():
        yield from (f"state of {name}: {kind}" for kind, value in values.items() if elements in _sizes(value))


def _sizes(value: object) -> list[int]:
    """Numbers of elements of the tensors in a value, without scalars."""
    return [each.numel() for each in tree_leaves(value) if isinstance(each, torch.Tensor) and each.dim()]


def _other_shapes(
    parameters: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor], kinds: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Parameters whose stored state has another shape: then the order of the parameters is another one. State with
    another number of dimensions, such as factored moments, may have any shape."""
    for name, parameter in parameters.items():
        shapes = [stored[f"{name}.{kind}"].shape for kind in kinds.get(name, ())]
        same_rank = [shape for shape in shapes if len(shape) == parameter.dim()]
        if same_rank and tuple(parameter.shape) not in same_rank:
            yield f"{name}: saved for a parameter of {list(same_rank[0])}, here it has {list(parameter.shape)}"
