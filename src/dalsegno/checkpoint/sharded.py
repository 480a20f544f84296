"""Model and optimizer as what they are to a checkpoint: named tensors, spread over the ranks, and a small rest.

The tensors go through DCP. The rest (extra state, scalars, hyperparameters) goes through the codec. Everything has the
name of the model's own parameters, so that it finds its place whatever the number of ranks or the order of groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dalsegno.component import State
from dalsegno.errors import CannotSave, StateMismatch
from dalsegno.pieces import cleaned

from .index import StoredTensor
from .layout import DTYPES, KNOWN, name_of

Tensors = dict[str, torch.Tensor]


class Sharded(Protocol):
    """A component whose tensors are spread over the ranks. ``key`` is its folder in a checkpoint: no dots in it."""

    @property
    def key(self) -> str: ...

    @property
    def class_name(self) -> str: ...

    def capture(self) -> tuple[Tensors, State]:
        """The tensors by name (not copied), and all else; the same names and the same rest on every rank."""
        ...

    def prepare(self, stored: Mapping[str, StoredTensor], rest: State) -> Tensors:
        """The tensors to load into, by name: all that are stored, and nothing else.

        Raises:
            StateMismatch: if what is stored does not fit; the message lists every difference.
        """
        ...

    def restore(self, tensors: Tensors, rest: State) -> None:
        """Take over the tensors of :meth:`prepare`, loaded by now, and the rest."""
        ...


class ModelState:
    """A model's parameters, persistent buffers and extra state. Tied tensors are saved once.

    Args:
        model: the module itself; a DistributedDataParallel around it is looked through. Under FSDP2 its
            parameters are DTensors, and each rank saves its own part.
    """

    key = "model"

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrapped(model)

    @property
    def class_name(self) -> str:
        return _class_name(self._model)

    def capture(self) -> tuple[Tensors, State]:
        tensors, tied, extra = self._sorted()
        return tensors, {"tied": tied, "extra": extra}

    def prepare(self, stored: Mapping[str, StoredTensor], rest: State) -> Tensors:
        tensors, tied, extra = self._sorted()
        here = {**tensors, **{alias: tensors[name] for alias, name in tied.items()}}
        sources = {name: rest["tied"].get(name, name) for name in here}
        there = {**stored, **{alias: stored[name] for alias, name in rest["tied"].items()}}
        complaints = [
            *(f"missing in the checkpoint: {name}{_form(here[name])}" for name in here.keys() - there.keys()),
            *(f"missing in the checkpoint: {name}" for name in extra.keys() - rest["extra"].keys()),
            *(f"unexpected in the checkpoint: {name}{_form(there[name])}" for name in there.keys() - here.keys()),
            *(f"unexpected in the checkpoint: {name}" for name in rest["extra"].keys() - extra.keys()),
            *(
                f"{name}: saved as{_form(there[name])}, here{_form(here[name])}"
                for name in here.keys() & there.keys()
                if _form(here[name]) != _form(there[name])
            ),
            *(
                f"{alias}: here it is {name} itself, saved were two tensors"
                for alias, name in tied.items()
                if sources[alias] != sources[name]
            ),
        ]
        _complain(self, complaints)
        return {sources[name]: tensor for name, tensor in tensors.items()}

    def restore(self, tensors: Tensors, rest: State) -> None:
        # Most tensors are the model's own by now. Loading them all the same lets the model's hooks do what they do to
        # any state dict, and gives what was tied when saved, but is not now, to every name that it has here.
        state = {}
        for raw_name in self._model.state_dict(keep_vars=True):
            name = cleaned(raw_name)
            source = rest["tied"].get(name, name)
            state[raw_name] = tensors[source] if source in tensors else rest["extra"][name]
        self._model.load_state_dict(state)

    def _sorted(self) -> tuple[Tensors, dict[str, str], dict[str, Any]]:
        """Tensors, each once; further names of the same tensors; values of ``get_extra_state``."""
        tensors: Tensors = {}
        tied: dict[str, str] = {}
        extra: dict[str, Any] = {}
        names: dict[int, str] = {}
        for raw_name, value in self._model.state_dict(keep_vars=True).items():
            name = cleaned(raw_name)
            if not isinstance(value, torch.Tensor) or name.endswith("_extra_state"):
                extra[name] = value
            elif id(value) in names:
                tied[name] = names[id(value)]
            elif not _is_dense(value):
                raise CannotSave(
                    f"{self.key}.{name}: cannot save a {type(value).__qualname__} with {value.layout}, {value.dtype} "
                    f"on {value.device}; it must be a dense tensor or DTensor, of one of {', '.join(DTYPES)}"
                )
            else:
                names[id(value)] = name
                tensors[name] = value.detach()
        return tensors, tied, extra


class OptimizerState:
    """The state of any torch optimizer, by parameter name.

    State that has its parameter's shape, or is a DTensor, is sharded like the parameter; all else (step counters,
    factored moments, histories) is the same on every rank and goes into the rest with the groups' hyperparameters.

    Args:
        model: the model whose parameters it updates, for their names.
        optimizer: may have no state yet: it is created as the checkpoint names it, without a step.
    """

    key = "optimizer"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = unwrapped(model)
        self._optimizer = optimizer

    @property
    def class_name(self) -> str:
        return _class_name(self._optimizer)

    def capture(self) -> tuple[Tensors, State]:
        packed = self._optimizer.state_dict()
        named = [each for group in self._named_groups() for each in group]
        tensors: Tensors = {}
        sharded: dict[str, list[str]] = {}
        on_cpu: dict[str, list[str]] = {}
        plain: dict[str, dict[str, Any]] = {}
        for number, state in packed["state"].items():
            if number not in range(len(named)):
                continue
            name, parameter = named[number]
            plain[name] = {}
            for kind, value in state.items():
                if _is_sharded(value, parameter):
                    tensors[f"{name}.{kind}"] = value
                    sharded.setdefault(name, []).append(kind)
                    continue
                plain[name][kind] = value
                if isinstance(value, torch.Tensor) and value.device.type == "cpu" != parameter.device.type:
                    on_cpu.setdefault(name, []).append(kind)
        return tensors, {
            "state": plain,
            "sharded": sharded,
            "on_cpu": on_cpu,
            "other": {key: value for key, value in packed["state"].items() if key not in range(len(named))},
            "groups": [
                {**group, "params": [named[number][0] for number in group["params"]]}
                for group in packed["param_groups"]
            ],
        }

    def prepare(self, stored: Mapping[str, StoredTensor], rest: State) -> Tensors:
        groups = [[name for name, _ in group] for group in self._named_groups()]
        saved = [group["params"] for group in rest["groups"]]
        complaints = []
        if len(groups) != len(saved):
            complaints.append(f"{len(saved)} parameter groups in the checkpoint, {len(groups)} here")
        for number, (here, there) in enumerate(zip(groups, saved, strict=False)):
            complaints += [f"group {number}, missing in the checkpoint: {name}" for name in {*here} - {*there}]
            complaints += [f"group {number}, unexpected in the checkpoint: {name}" for name in {*there} - {*here}]
        parameters = {name: parameter for group in self._named_groups() for name, parameter in group}
        wanted = {f"{name}.{kind}": name for name, kinds in rest["sharded"].items() for kind in kinds}
        complaints += [f"listed, but without its tensor: {name}" for name in wanted.keys() - stored.keys()]
        _complain(self, complaints)
        return {key: _like(parameters[name], stored[key]) for key, name in wanted.items()}

    def restore(self, tensors: Tensors, rest: State) -> None:
        named = [each for group in self._named_groups() for each in group]
        numbers = {name: number for number, (name, _) in enumerate(named)}
        saved = {
            name: plain | {kind: tensors[f"{name}.{kind}"] for kind in rest["sharded"].get(name, ())}
            for name, plain in rest["state"].items()
        }
        groups, position = [], itertools.count()
        for group, here in zip(rest["groups"], self._optimizer.param_groups, strict=True):
            placed = {key: _placed_like(value, here.get(key)) for key, value in group.items()}
            groups.append(placed | {"params": [next(position) for _ in here["params"]]})
        state = {numbers[name]: values for name, values in saved.items()} | rest["other"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        # load_state_dict casts state to the parameter's type, moves it to its device and mangles strings.
        for name, values in saved.items():
            own = self._optimizer.state[named[numbers[name]][1]]
            for kind, value in values.items():
                is_on_cpu = kind in rest["on_cpu"].get(name, ())
                own[kind] = value if is_on_cpu else _exactly(value, own.get(kind))

    def _named_groups(self) -> list[list[tuple[str, torch.Tensor]]]:
        """The parameters of each group, in the optimizer's order, which ``state_dict`` numbers them by."""
        names = {id(each): cleaned(name) for name, each in self._model.named_parameters()}
        return [
            [
                (names.get(id(each), f"group[{number}].params[{position}]"), each)
                for position, each in enumerate(group["params"])
            ]
            for number, group in enumerate(self._optimizer.param_groups)
        ]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside of DistributedDataParallel."""
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    return model


def _class_name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _is_dense(value: object) -> bool:
    return (
        type(value) in (torch.Tensor, nn.Parameter, DTensor)
        and isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.dtype in KNOWN
        and not value.is_meta
    )


def _is_sharded(value: object, parameter: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or not _is_dense(value):
        return False
    return isinstance(value, DTensor) or (value.dim() > 0 and value.shape == parameter.shape)


def _like(parameter: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """An empty tensor for ``stored``, spread over the ranks as ``parameter`` is, if it has that shape."""
    if parameter.shape == stored.shape:
        return torch.empty_like(parameter, dtype=stored.dtype).detach()
    local = torch.empty(stored.shape, dtype=stored.dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return local
    mesh = parameter.device_mesh
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _placed_like(value: Any, here: Any) -> Any:
    """A hyperparameter that is a tensor, say the learning rate, on the device of the one it replaces."""
    if isinstance(value, torch.Tensor) and isinstance(here, torch.Tensor):
        return value.to(here.device)
    return value


def _exactly(saved: Any, loaded: Any) -> Any:
    """``saved``, as it was, on the device where ``load_state_dict`` put it."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: _exactly(value, loaded.get(key)) for key, value in saved.items()}
    if isinstance(saved, list | tuple) and isinstance(loaded, list | tuple) and len(saved) == len(loaded):
        return type(saved)([_exactly(*pair) for pair in zip(saved, loaded, strict=True)])
    return saved


def _form(thing: torch.Tensor | StoredTensor) -> str:
    return f" {list(thing.shape)} {name_of(thing.dtype)}"


def _complain(sharded: Sharded, complaints: Iterable[str]) -> None:
    if lines := sorted(complaints):
        raise StateMismatch(
            f"{sharded.key}: the checkpoint does not fit this {sharded.class_name}:\n  " + "\n  ".join(lines)
        )
