"""Model and optimizer as components of a checkpoint: tensors by FQN, sharded over the ranks, and a small rest.

DCP loads the tensors. The rest (extra state, scalars, hyperparameters) goes through the codec. All names are FQNs of
the model's parameters, so that state is found at any world size and in any order of parameter groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dalsegno.checkpoint.format.index import Index
from dalsegno.checkpoint.format.keys import LOSS, MODEL
from dalsegno.checkpoint.format.layout import name_of
from dalsegno.checkpoint.format.stored_tensors import StoredTensor
from dalsegno.distributed.sharded_tensors import once, strip_wrappers
from dalsegno.distributed.stage_places import is_cut, is_elsewhere, like_parameter
from dalsegno.errors import CannotSave
from dalsegno.stateful.component import State

from . import positions
from .contract import Captured, LoadTarget, Tensors
from .dense import is_sharded
from .named_tensors import NamedTensors
from .non_tensor_schema import check_model_rest, check_optimizer_rest
from .optimizer_rows import OptimizerRows
from .placement import cast_as, exactly, like, placed_like
from .stages import of_all_stages
from .wrapped import hidden_tensors


class ModelState:
    """A model's parameters, persistent buffers and extra state. Tied tensors are saved once, wrapped ones in parts.

    Args:
        model: the module; DistributedDataParallel around it is removed. Under FSDP2 its parameters are DTensors, and
            each rank saves its shards.
        key: key of the component.
        apart_from: a model whose tensors are excluded because it is saved separately.
    """

    optimizer = None  # a forward may change buffers

    def __init__(self, model: nn.Module, *, key: str = MODEL, apart_from: nn.Module | None = None) -> None:
        self.key = key
        self._model = unwrapped(model)
        self._apart_from = apart_from

    @property
    def class_name(self) -> str:
        return class_name_of(self._model)

    def capture(self) -> Captured:
        here = self._sorted()
        wrapped = {"wrapped": here.wrapped} if here.wrapped else {}
        return Captured(here.tensors, {"tied": here.tied, "extra": here.extra, **wrapped}, here.frozen)

    def check_rest(self, stored: Index, rest: State, where: str) -> None:
        check_model_rest(rest, stored.known_of(self.key), where)

    def differences(self, stored: Index, rest: State, *, any_dtype: bool = False) -> list[str]:
        model = self._sorted()
        tensors, tied, extra = model.tensors, model.tied, model.extra
        known = stored.known_of(self.key)
        sources = model.sources(known, rest)
        misfits = model.misfits(rest)
        in_misfits = {part for misfit in misfits for part in misfit.parts}
        here = {**tensors, **{alias: tensors[name] for alias, name in tied.items()}}
        here = {name: each for name, each in here.items() if name not in in_misfits}
        there = _with_aliases(known, {**rest["tied"], **sources})
        there = {name: each for name, each in there.items() if name not in in_misfits}
        lines = [
            *(f"{misfit.name}: {misfit.difference}" for misfit in misfits),
            *(f"missing in the checkpoint: {name}{_form(here[name])}" for name in here.keys() - there.keys()),
            *(f"missing in the checkpoint: {name}" for name in extra.keys() - rest["extra"].keys()),
            *(f"unexpected in the checkpoint: {name}{_form(there[name])}" for name in there.keys() - here.keys()),
            *(f"unexpected in the checkpoint: {name}" for name in rest["extra"].keys() - extra.keys()),
            *(
                f"{name}: saved as{_form(there[name])}, here{_form(here[name])}"
                for name in here.keys() & there.keys()
                if here[name].shape != there[name].shape or (here[name].dtype != there[name].dtype and not any_dtype)
            ),
            *(
                f"{alias}: tied to {name} here, but saved as two tensors"
                for alias, name in tied.items()
                if {alias, name} <= there.keys() and sources[alias] != sources[name]
            ),
        ]
        return sorted(lines)

    def prepare(self, stored: Index, rest: State) -> LoadTarget:
        there = stored.of(self.key)
        model = self._sorted()
        sources = model.sources(stored.known_of(self.key), rest)
        in_misfits = {part for misfit in model.misfits(rest) for part in misfit.parts}
        targets = {
            sources[name]: tensor
            for name, tensor in model.tensors.items()
            if name not in in_misfits
            and sources[name] in there
            and tensor.shape == there[sources[name]].shape
            and not is_elsewhere(tensor)
        }

        def commit() -> None:
            # Most tensors are loaded in place by now. Loading them again runs the model's load_state_dict hooks, and
            # copies tensors that were tied when saved, but are not now, to each of their names. Wrapped tensors are
            # left out, which have no tensor of their own name, or one of another class.
            state, hidden = {}, hidden_tensors(self._model)
            for raw, here in self._raw().items():
                name = strip_wrappers(raw)
                if name in model.wrapped or raw in hidden:
                    continue
                source = targets.get(sources.get(name, name))
                if isinstance(here, torch.Tensor) and once(here).shape != here.shape:
                    continue  # already loaded, and torch cannot write to an expanded tensor
                if source is not None and isinstance(here, torch.Tensor) and source.shape == here.shape:
                    state[raw] = source
                elif name in rest["extra"]:
                    state[raw] = rest["extra"][name]
            self._model.load_state_dict(state, strict=False)

        return LoadTarget(targets, commit)

    def absent(self, stored: Index, rest: State) -> Tensors:
        """This model's tensors, by their names in the checkpoint, whose values are not saved there."""
        there = stored.absent_of(self.key)
        model = self._sorted()
        sources = model.sources(stored.known_of(self.key), rest)
        return {
            sources[name]: tensor
            for name, tensor in model.tensors.items()
            if sources[name] in there and tensor.shape == there[sources[name]].shape
        }

    def is_empty(self) -> bool:
        """Whether there are no tensors and no extra state."""
        return not self._raw()

    def held(self) -> set[int]:
        """``id`` of each parameter and buffer that is saved here, even if the model's hooks save a copy of it."""
        raw = {strip_wrappers(name): each for name, each in self._raw().items()}
        copied = {id(each) for name, each in self._model.named_parameters() if strip_wrappers(name) in raw}
        return {id(each) for each in raw.values()} | copied

    def is_trained(self) -> bool:
        """Whether any parameter requires a gradient."""
        return any(parameter.requires_grad for parameter in self._model.parameters())

    def names(self) -> set[str]:
        """Names of all tensors, including further names of tied ones."""
        model = self._sorted()
        return {*model.tensors, *model.tied}

    def tied_names(self) -> list[list[str]]:
        """Names of each tied tensor; first the name under which it is saved."""
        return self._sorted().tied_names()

    def _raw(self) -> dict[str, Any]:
        """The model's state dict, with the parameters themselves."""
        try:
            raw: dict[str, Any] = dict(self._model.state_dict(keep_vars=True)) | hidden_tensors(self._model)
        except NotImplementedError as error:  # which some libraries' modules raise
            raise CannotSave(
                f"{self.key}: its state_dict() raises NotImplementedError: {error}; replace that module, or give it "
                "a _save_to_state_dict"
            ) from error
        if self._apart_from is None:
            return raw
        others = {id(each) for each in self._apart_from.state_dict(keep_vars=True).values()}
        return {name: each for name, each in raw.items() if id(each) not in others}

    def _sorted(self) -> NamedTensors:
        return NamedTensors.of(self._raw(), self.key)


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
    """

    key = "optimizer"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: nn.Module | None = None) -> None:
        self._model = unwrapped(model)
        self._loss_fn = loss_fn
        self.optimizer: torch.optim.Optimizer = optimizer

    @property
    def class_name(self) -> str:
        return class_name_of(self.optimizer)

    def capture(self) -> Captured:
        packed = self.optimizer.state_dict()
        named = [each for group in self._named_groups() for each in group]
        tensors: Tensors = {}
        rows = OptimizerRows()
        for number, (name, parameter) in enumerate(named):  # this order, independent of which was updated first
            if number not in packed["state"]:
                continue
            plain = rows.plain[name] = {}
            for kind, value in packed["state"][number].items():
                if is_sharded(value, parameter):
                    tensors[f"{name}.{kind}"] = like_parameter(value, parameter)
                    rows.sharded.setdefault(name, []).append(kind)
                    continue
                plain[kind] = value
                if isinstance(value, torch.Tensor) and value.device.type == "cpu" != parameter.device.type:
                    rows.on_cpu.setdefault(name, []).append(kind)
        if is_cut(self._model):
            tensors, rows = of_all_stages(named, tensors, rows)
        rest = {
            **rows.by_kind(),
            "other": {key: value for key, value in packed["state"].items() if key not in range(len(named))},
            "groups": [
                {**group, "params": [named[number][0] for number in group["params"]]}
                for group in packed["param_groups"]
            ],
        }
        return Captured(tensors, rest)

    def check_rest(self, stored: Index, rest: State, where: str) -> None:
        check_optimizer_rest(rest, self.optimizer, where)

    def differences(self, stored: Index, rest: State, *, any_dtype: bool = False) -> list[str]:
        groups = [[name for name, _ in group] for group in self._named_groups(rest)]
        saved = [group["params"] for group in rest["groups"]]
        lines = []
        if len(groups) != len(saved):
            lines.append(f"{len(saved)} parameter groups in the checkpoint, {len(groups)} here")
        for number, (ours, theirs) in enumerate(zip(groups, saved, strict=False)):
            lines += [f"group {number}, missing in the checkpoint: {name}" for name in {*ours} - {*theirs}]
            lines += [f"group {number}, unexpected in the checkpoint: {name}" for name in {*theirs} - {*ours}]
        wanted = {f"{name}.{kind}" for name, kinds in OptimizerRows.of(rest).sharded.items() for kind in kinds}
        there = stored.of(self.key).keys()
        lines += [f"listed, but its tensor is missing: {name}" for name in wanted - there]
        lines += [f"tensor that is not listed: {name}" for name in there - wanted]
        if positions.are_all(saved) and not lines:
            parameters = dict(each for group in self._named_groups(rest) for each in group)
            lines += positions.differences(parameters, stored.of(self.key), OptimizerRows.of(rest).sharded)
        return sorted(lines)

    def prepare(self, stored: Index, rest: State) -> LoadTarget:
        named = [each for group in self._named_groups(rest) for each in group]
        fqns = [name for group in self._named_groups() for name, _ in group]
        weights = stored.of(MODEL) | {_of_loss(name): each for name, each in stored.of(LOSS).items()}
        own = stored.of(self.key)
        rows = OptimizerRows.of(rest)
        fitting = {  # state of a parameter whose shape has changed is dropped
            name: number
            for number, (name, parameter) in enumerate(named)
            if name in rows.plain
            and (fqns[number] not in weights or weights[fqns[number]].shape == parameter.shape)
            and not is_elsewhere(parameter)
        }
        casts = {  # parameters whose dtype has changed
            name: (weights[fqn].dtype, named[number][1].dtype)
            for name, number in fitting.items()
            if (fqn := fqns[number]) in weights and weights[fqn].dtype != named[number][1].dtype
        }
        tensors = {
            f"{name}.{kind}": like(named[number][1], own[f"{name}.{kind}"], casts.get(name))
            for name, number in fitting.items()
            for kind in rows.sharded.get(name, ())
        }

        def commit() -> None:
            saved = {
                name: {kind: cast_as(value, casts.get(name)) for kind, value in rows.plain[name].items()}
                | {kind: tensors[f"{name}.{kind}"] for kind in rows.sharded.get(name, ())}
                for name in fitting
            }
            state = {fitting[name]: values for name, values in saved.items()} | rest["other"]
            self.optimizer.load_state_dict({"state": state, "param_groups": self._groups(rest["groups"])})
            # Undo load_state_dict's casts to the parameter's dtype and its mangling of strings.
            for name, values in saved.items():
                own = self.optimizer.state[named[fitting[name]][1]]
                for kind, value in values.items():
                    is_on_cpu = kind in rows.on_cpu.get(name, ())
                    own[kind] = value if is_on_cpu else exactly(value, own.get(kind))

        return LoadTarget(tensors, commit)

    def _groups(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups with the saved hyperparameters, or the present ones if the number of groups has changed."""
        own, position, groups = self.optimizer.param_groups, itertools.count(), []
        for group, here in zip(saved if len(saved) == len(own) else own, own, strict=True):
            placed = {key: placed_like(value, here.get(key)) for key, value in group.items()}
            names = {"param_names": here["param_names"]} if "param_names" in here else {}
            groups.append(here | placed | names | {"params": [next(position) for _ in here["params"]]})
        return groups

    def _named_groups(self, saved: State = None) -> list[list[tuple[str, torch.Tensor]]]:
        """Name and parameter of each group, in the order in which the optimizer's ``state_dict`` numbers them.

        ``saved``: the stored rest. If it names all parameters by position, so does the result.
        """
        if saved is not None and positions.are_all([group["params"] for group in saved["groups"]]):
            return positions.named(self.optimizer)
        names = {id(each): strip_wrappers(name) for name, each in self._model.named_parameters()}
        for name, each in () if self._loss_fn is None else self._loss_fn.named_parameters():
            names.setdefault(id(each), _of_loss(strip_wrappers(name)))
        return [
            [
                (names.get(id(each), positions.name_of(number, position)), each)
                for position, each in enumerate(group["params"])
            ]
            for number, group in enumerate(self.optimizer.param_groups)
        ]


def _of_loss(name: str) -> str:
    """A name that no parameter of the model has, since those contain no slash."""
    return f"{LOSS}/{name}"


def _with_aliases(stored: Mapping[str, StoredTensor], sources: Mapping[str, str]) -> dict[str, StoredTensor]:
    return {**stored, **{alias: stored[name] for alias, name in sources.items() if name in stored}}


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel or DataParallel."""
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    return model


def class_name_of(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _form(thing: torch.Tensor | StoredTensor) -> str:
    return f" {list(thing.shape)} {name_of(thing.dtype)}"
