"""A model as a component of a checkpoint: tensors by FQN, sharded over the ranks, and a rest that the codec encodes."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dalsegno.checkpoint.contract import Captured, LoadTarget, Tensors
from dalsegno.checkpoint.index import Index, StoredTensor
from dalsegno.checkpoint.names import MODEL
from dalsegno.checkpoint.tensor_files import is_dense, name_of
from dalsegno.checkpoint.wrapped import Parts, SavedSpec, WrapperSpec, describe_mismatch, ends, hidden_tensors, parts_of
from dalsegno.distributed.sharded_tensors import strip_wrappers, unexpanded
from dalsegno.distributed.stage_places import is_on_other_stage, like_parameter
from dalsegno.errors import CannotSave, StateMismatch
from dalsegno.stateful.component import State, class_name_of
from dalsegno.stateful.schema import check


class ModelRest(TypedDict):
    tied: dict[str, str]
    extra: dict[str, Any]
    wrapped: NotRequired[dict[str, SavedSpec]]


class ModelState:
    """A model's parameters, persistent buffers and extra state, without DistributedDataParallel around it. Tied tensors
    are saved once, wrapped ones in parts; under FSDP2, whose parameters are DTensors, each rank saves its shards.
    ``apart_from``: a model that is saved separately."""

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
        check(rest, ModelRest, where)
        known = stored.known_of(self.key)
        for alias, name in rest["tied"].items():
            if name not in known:
                raise StateMismatch(f"{where}.tied: {alias!r} is tied to {name!r}, which is not saved")

    def differences(self, stored: Index, rest: State, *, any_dtype: bool = False) -> list[str]:
        model = self._sorted()
        tensors, tied, extra = model.tensors, model.tied, model.extra
        known = stored.known_of(self.key)
        sources = model.sources(known, rest)
        lines, in_mismatches = model.mismatches(rest)
        here = {**tensors, **{alias: tensors[name] for alias, name in tied.items()}}
        here = {name: each for name, each in here.items() if name not in in_mismatches}
        aliases = {**rest["tied"], **sources}
        there = known | {alias: known[name] for alias, name in aliases.items() if name in known}
        there = {name: each for name, each in there.items() if name not in in_mismatches}
        fitting = self._room(here, there)
        missing, unexpected = here.keys() - there.keys(), there.keys() - here.keys()
        lines += [
            *(f"missing in the checkpoint: {name}{_described(here[name])}" for name in missing),
            *(f"missing in the checkpoint: {name}" for name in extra.keys() - rest["extra"].keys()),
            *(f"unexpected in the checkpoint: {name}{_described(there[name])}" for name in unexpected),
            *(f"unexpected in the checkpoint: {name}" for name in rest["extra"].keys() - extra.keys()),
            *(
                f"{name}: saved as{_described(there[name])}, here{_described(here[name])}"
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
        advice = "if the model makes these in its first forward pass, call it on a batch once before you build the run"
        return [*sorted(lines), *([advice] if unexpected and not missing else [])]

    def prepare(self, stored: Index, rest: State) -> LoadTarget:
        there = stored.of(self.key)
        model = self._sorted()
        sources = model.sources(stored.known_of(self.key), rest)
        _, in_mismatches = model.mismatches(rest)
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
                    if name in rest["extra"]:
                        state[raw] = rest["extra"][name]
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
        there = stored.absent.get(self.key, {})
        model = self._sorted()
        sources = model.sources(stored.known_of(self.key), rest)
        return {
            sources[name]: tensor
            for name, tensor in model.detached().items()
            if sources[name] in there and tensor.shape == there[sources[name]].shape
        }

    def is_empty(self) -> bool:
        return not self._raw()

    def held(self) -> set[int]:
        """``id`` of each parameter and buffer that is saved here, even if the model's hooks save a copy of it."""
        raw = {strip_wrappers(name): each for name, each in self._raw().items()}
        copied = {id(each) for name, each in self._model.named_parameters() if strip_wrappers(name) in raw}
        return {id(each) for each in raw.values()} | copied

    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self._model.parameters())

    def names(self) -> set[str]:
        """Names of all tensors, including further names of tied ones."""
        model = self._sorted()
        return {*model.tensors, *model.tied}

    def tied_names(self) -> list[list[str]]:
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
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    return model


def _described(thing: torch.Tensor | StoredTensor) -> str:
    return f" {list(thing.shape)} {name_of(thing.dtype)}"


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """Content of a state dict.

    Attributes:
        tensors: by name, each once: the model's own, which may require gradients.
        tied: further name of a tied tensor to its name in ``tensors``.
        extra: values of ``get_extra_state``, and others that are not tensors.
        frozen: names of the tensors that are frozen parameters.
        wrapped: specs of the wrapped tensors, of which ``tensors`` has the parts.
    """

    tensors: Tensors
    tied: dict[str, str]
    extra: dict[str, Any]
    frozen: set[str]
    wrapped: dict[str, WrapperSpec]

    @classmethod
    def of(cls, raw: Mapping[str, Any], component: str) -> NamedTensors:
        """``raw``: a state dict with the parameters themselves."""
        found = cls({}, {}, {}, set(), {})
        names: dict[int, str] = {}
        taken_apart: dict[int, Parts] = {}  # keeps the parts alive, whose ids are compared
        for raw_name, value in raw.items():
            name = strip_wrappers(raw_name)
            is_stored_as_it_is = is_dense(value)
            if name.endswith("_extra_state") or not isinstance(value, torch.Tensor):
                found.extra[name] = value
                continue
            if found.wrapped and not found.wrapped.keys().isdisjoint(_parents(name)):
                continue  # by which the module itself saves the wrapped tensor
            if is_stored_as_it_is:  # nothing is made for it: thousands of objects set off the garbage collector
                found._add(name, value, value, names)
                continue
            if id(value) not in taken_apart:
                taken_apart[id(value)] = parts_of(value, f"{component}.{name}")
            parts, spec = taken_apart[id(value)]
            if spec is not None:
                found.wrapped[name] = spec
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

    def mismatches(self, rest: State) -> tuple[list[str], set[str]]:
        """A line for each tensor that is wrapped in another way in the checkpoint; and the names of their parts in
        both."""
        lines, parts = [], set()
        saved: Mapping[str, WrapperSpec] = rest.get("wrapped", {})
        for name in {**self.wrapped, **saved}:
            there, here = saved.get(name), self.wrapped.get(name)
            if difference := describe_mismatch(there, here):
                lines.append(f"{name}: {difference}")
                parts |= {f"{name}{end}" for spec in (there, here) for end in ends(spec)}
        return lines, parts


def _parents(name: str) -> Iterator[str]:
    """``a.b`` and ``a`` for ``a.b.c``."""
    while name := name.rpartition(".")[0]:
        yield name


def room_for(model: nn.Module, name: str, saved: StoredTensor) -> torch.Tensor | None:
    """An empty tensor of the saved shape, for the buffer ``name``; None if its module does not take that shape. That is
    tried with a copy of the module: what :meth:`load_state_dict` does there is its own affair."""
    owner, _, end = name.rpartition(".")
    with contextlib.suppress(Exception):  # whatever it raises, it has refused
        probe = copy.deepcopy(model.get_submodule(owner))
        buffer = dict(probe.named_buffers(recurse=False))[end]
        room = torch.zeros(saved.shape, dtype=buffer.dtype, device=buffer.device)
        probe.load_state_dict({end: room}, strict=False)
        if dict(probe.named_buffers(recurse=False))[end].shape == saved.shape:
            return room
    return None
