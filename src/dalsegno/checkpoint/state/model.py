"""A model as a component of a checkpoint: tensors by FQN, sharded over the ranks, and a rest that the codec encodes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dalsegno.checkpoint.format.composites import describe_difference, is_composite, make_room
from dalsegno.checkpoint.format.index import Index
from dalsegno.checkpoint.format.keys import MODEL
from dalsegno.checkpoint.format.layout import name_of
from dalsegno.checkpoint.format.stored_tensors import StoredTensor
from dalsegno.distributed.sharded_tensors import strip_wrappers, unexpanded
from dalsegno.distributed.stage_places import is_on_other_stage
from dalsegno.errors import CannotSave
from dalsegno.stateful.component import State

from .contract import Captured, LoadTarget, Tensors, class_name_of
from .named_tensors import NamedTensors
from .non_tensor_schema import check_model_rest
from .resized import room_for
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
        mismatches = model.mismatches(rest)
        in_mismatches = {part for mismatch in mismatches for part in mismatch.parts}
        here = {**tensors, **{alias: tensors[name] for alias, name in tied.items()}}
        here = {name: each for name, each in here.items() if name not in in_mismatches}
        aliases = {**rest["tied"], **sources}
        there = known | {alias: known[name] for alias, name in aliases.items() if name in known}
        there = {name: each for name, each in there.items() if name not in in_mismatches}
        fitting = self._room(here, there)
        lines = [
            *(f"{mismatch.name}: {mismatch.difference}" for mismatch in mismatches),
            *(f"missing in the checkpoint: {name}{_form(here[name])}" for name in here.keys() - there.keys()),
            *(f"missing in the checkpoint: {name}" for name in extra.keys() - rest["extra"].keys()),
            *(f"unexpected in the checkpoint: {name}{_form(there[name])}" for name in there.keys() - here.keys()),
            *(f"unexpected in the checkpoint: {name}" for name in rest["extra"].keys() - extra.keys()),
            *(
                f"{name}: {difference}"
                for name in extra.keys() & rest["extra"].keys()
                if (difference := _composite_difference(rest["extra"][name], extra[name]))
            ),
            *(
                f"{name}: saved as{_form(there[name])}, here{_form(here[name])}"
                for name in here.keys() & there.keys()
                if (here[name].shape != there[name].shape and name not in fitting)
                or (here[name].dtype != there[name].dtype and not any_dtype)
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
        in_mismatches = {part for mismatch in model.mismatches(rest) for part in mismatch.parts}
        targets = {
            sources[name]: tensor
            for name, tensor in model.detached().items()
            if name not in in_mismatches
            and sources[name] in there
            and tensor.shape == there[sources[name]].shape
            and not is_on_other_stage(tensor)
        }
        here = {name: tensor for name, tensor in model.tensors.items() if name not in in_mismatches}
        room = self._room(here, {name: there[sources[name]] for name in here if sources[name] in there})
        targets |= {sources[name]: each for name, each in room.items()}
        resized = {sources[name] for name in room}

        def commit() -> None:
            # Most tensors are loaded in place by now. Loading them again runs the model's load_state_dict hooks, and
            # copies tensors that were tied when saved, but are not now, to each of their names. Wrapped tensors are
            # left out, which have no tensor of their own name, or one of another class.
            live, hidden = self._raw(), hidden_tensors(self._model)
            state: OrderedDict[str, Any] = OrderedDict()
            # without it, some modules load old formats
            state._metadata = getattr(live, "_metadata", None)  # type: ignore[attr-defined]
            for raw, here in live.items():
                name = strip_wrappers(raw)
                if name in model.wrapped or raw in hidden:
                    continue
                if name in model.extra:
                    if name in rest["extra"] and not _composite_difference(rest["extra"][name], here):
                        state[raw] = rest["extra"][name]
                        make_room(here, state[raw])
                    continue
                source = targets.get(sources.get(name, name))
                if isinstance(here, torch.Tensor) and unexpanded(here).shape != here.shape:
                    continue  # already loaded, and torch cannot write to an expanded tensor
                if source is None or not isinstance(here, torch.Tensor):
                    continue
                if source.shape == here.shape or sources[name] in resized:
                    state[raw] = source
            self._model.load_state_dict(state, strict=False)

        return LoadTarget(targets, commit)

    def absent(self, stored: Index, rest: State) -> Tensors:
        """This model's tensors, by their names in the checkpoint, whose values are not saved there."""
        there = stored.absent_of(self.key)
        model = self._sorted()
        sources = model.sources(stored.known_of(self.key), rest)
        return {
            sources[name]: tensor
            for name, tensor in model.detached().items()
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

    def _raw(self) -> Mapping[str, Any]:
        """The model's state dict, with the parameters themselves."""
        try:
            live = self._model.state_dict(keep_vars=True)
        except NotImplementedError as error:  # which some libraries' modules raise
            raise CannotSave(
                f"{self.key}: its state_dict() raises NotImplementedError: {error}; replace that module, or give it "
                "a _save_to_state_dict"
            ) from error
        hidden = hidden_tensors(self._model)
        if not hidden and self._apart_from is None:
            return live  # a copy of thousands of names takes a while
        others: set[int] = set()
        if self._apart_from is not None:
            others = {id(each) for each in self._apart_from.state_dict(keep_vars=True).values()}
        raw = OrderedDict((name, each) for name, each in {**live, **hidden}.items() if id(each) not in others)
        raw._metadata = getattr(live, "_metadata", None)  # type: ignore[attr-defined]
        return raw

    def _room(self, here: Tensors, there: Mapping[str, StoredTensor]) -> Tensors:
        """Tensors to load into, for buffers of another shape than the saved ones that their modules resize."""
        others = [name for name in here if name in there and here[name].shape != there[name].shape]
        raw = {strip_wrappers(each): each for each in self._raw()} if others else {}
        found = {name: room_for(self._model, raw[name], there[name]) for name in others}
        return {name: room for name, room in found.items() if room is not None}

    def _sorted(self) -> NamedTensors:
        return NamedTensors.of(self._raw(), self.key)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel or DataParallel."""
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    return model


def _composite_difference(saved: object, here: object) -> str:
    """How a saved value differs from one here that is not loaded in place, if either is a sparse or quantized tensor;
    empty if one can replace the other."""
    tensors = [each for each in (saved, here) if isinstance(each, torch.Tensor) and is_composite(each)]
    if not tensors:
        return ""
    if isinstance(saved, torch.Tensor) and isinstance(here, torch.Tensor):
        return describe_difference(saved, here)
    return f"saved as a {type(saved).__name__}, here a {type(here).__name__}"


def _form(thing: torch.Tensor | StoredTensor) -> str:
    return f" {list(thing.shape)} {name_of(thing.dtype)}"
