"""Flags: what the training has changed beside tensors and hyperparameters, so that a resumed leg has it again.

That is the mode of a submodule (``training``), whether a parameter is trained (``requires_grad``), plain attributes of
modules (a dropout's ``p``, the active adapter), small tensors of modules that ``state_dict`` leaves out, and numbers
that an optimizer keeps beside its groups. Only what has changed since the script built it is saved: the rest is as the
script of each leg has it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from dalsegno.checkpoint import unwrapped
from dalsegno.checkpoint.tensor_files import as_bytes, is_plain
from dalsegno.distributed.sharded_tensors import strip_wrappers
from dalsegno.errors import StateMismatch, first_few
from dalsegno.system.progress import format_bytes

logger = logging.getLogger("dalsegno")

LARGEST = 1 << 20
"""Bytes of a tensor that is saved here."""

_MOST_ITEMS = 256
_PLAIN = {bool, int, float, str, type(None), torch.dtype}
_UNCHANGING = {*_PLAIN, tuple}
_NUMBERS = (int, float)
_OF_MODULE = vars(nn.Module()).keys() - {"training"}
_OF_OPTIMIZER = vars(torch.optim.SGD([torch.zeros(1)])).keys()
_REQUIRES_GRAD = ".requires_grad"

Values = dict[str, Any]
"""By name, of one module or of the optimizer."""
Reading = dict[str, Values]
"""By the module's path."""


class Flags:
    """Flags of a run's optimizer and its modules, and of further ones that are saved: by the name that their paths
    begin with.

    What a module sets by itself in a leg's first step, such as ``is_initialized``, it sets again in the next leg's, so
    it is not saved; numbers are. The attributes of a module that has also made or replaced what cannot be saved, such
    as a cache, belong to that and are not saved either; its modes are.
    """

    state_scope = "per_rank"  # a rank of a pipeline runs its own stages only
    precedes_tensors = True  # averages are of the parameters that are trained
    state_schema = dict[str, dict[str, Any]]
    reshard_note = "those of the first rank"

    def __init__(self, modules: Mapping[str, nn.Module], optimizer: Optimizer) -> None:
        self._roots: dict[str, object] = {**modules, "optimizer": optimizer}
        self._places: dict[str, _Place] = {}
        self._built: Reading = {}  # of what the training has changed: the value before
        self._caches: set[tuple[str, str]] = set()  # what modules make in each leg, and keep
        self._loaded: Reading = {}
        self._warning: str | None = None  # "" once it was taken

    def add(self, others: Mapping[str, object]) -> None:
        """Modules and optimizers among ``others``, which a checkpoint contains, have flags, too."""
        self._roots |= {name: unwrapped(each) if isinstance(each, nn.Module) else each for name, each in others.items()}

    # -- what the training changes ----------------------------------------------------------------------------------

    def begin_leg(self) -> None:
        """What has changed until here is the script's."""
        self._changed()

    def resume(self) -> None:
        """Before the first step: set what was loaded again. A leg puts all modules into training mode, and handlers of
        on_train_begin prepare the model as for a new run."""
        self._changed()
        self._set(self._loaded)

    def note_changes(self, *, by_modules: bool = False) -> None:
        """Note what has changed since the last call, or since the leg began; ``by_modules``: in the leg's first
        step."""
        for path, before, values in self._changed():
            noted, its_class = self._built.setdefault(path, {}), type(self._places[path].holder)
            for name in sorted(values):
                value, was = values[name], before[name] if name in before else _value_of(its_class, name)
                if value == was or (path, name) in self._caches:
                    continue
                if isinstance(value, _Small | _Other) and not isinstance(was, _Small | _Other):
                    self._caches.add((path, name))
                elif not by_modules or _is_mode(name) or _is_state(was, value):
                    noted.setdefault(name, was)

    def keep(self) -> None:
        """The next leg continues from the present flags."""
        self._loaded = self.state_dict()

    # -- the component ----------------------------------------------------------------------------------------------

    def state_dict(self) -> Reading:
        self.note_changes()
        state, lost = Reading(), list[str]()
        with_caches = {path for path, _ in self._caches}
        for path, built in self._built.items():
            values = self._places[path].values if path in self._places else {}
            present = {name: values[name] for name in built if name in values}
            replaced = [name for name, value in present.items() if not _is_saved(built[name], value)]
            is_whole = not replaced and path not in with_caches
            kept = {name: value for name, value in present.items() if is_whole or _is_mode(name)}
            if kept:
                state[path] = {name: each.copy if isinstance(each, _Small) else each for name, each in kept.items()}
            held = [name for name in present if replaced and name not in kept and name not in replaced]
            named = [name for name in replaced if held or _size_of(present[name])]
            lost += [f"{path}.{name}{_size_of(present[name])}" for name in [*named, *held]]
        if lost and self._warning is None:
            self._warning = (
                f"a resumed run will differ from an uninterrupted one: the training changes {first_few(lost, 5)}, "
                "which no checkpoint contains; register it as a buffer that is saved (persistent=True), or return it "
                "from the module's get_extra_state"
            )
        return state

    def take_warning(self) -> str | None:
        """See :meth:`Component.take_warning`."""
        warning, self._warning = self._warning, self._warning and ""
        return warning or None

    def check_state(self, state: Reading) -> None:
        """Raises StateMismatch if a value cannot replace the present one."""
        holders = dict(self._holders())
        for path in state.keys() & holders.keys():
            here = self._values(holders[path])
            for name, value in state[path].items():
                there = here[name] if name in here else _value_of(holders[path], name)
                is_plain_value = not isinstance(there, _Small | _Other) and not isinstance(value, torch.Tensor)
                fits = type(value) is bool if _is_mode(name) else is_plain_value or _is_state(there, value)
                if not fits:
                    raise StateMismatch(f"flags: {path}.{name}: {_short(value)} cannot replace {_short(there)}")

    def load_state_dict(self, state: Reading) -> None:
        """Set these flags, and all others to what they were before training changed them."""
        self.note_changes()
        built = self._built
        self._set(
            {
                path: {
                    name: value.copy if isinstance(value, _Small) else value
                    for name, value in values.items()
                    if name not in state.get(path, {}) and not isinstance(value, _Other)
                }
                for path, values in built.items()
            }
        )
        self._changed()
        here = {path: self._places[path].values if path in self._places else {} for path in state}
        self._built = {
            path: {name: built.get(path, {}).get(name, here[path].get(name)) for name in values}
            for path, values in state.items()
        }
        self._loaded = state
        if missing := self._set(state):
            logger.warning(
                "flags: the checkpoint has %s as the training has set it, which the model no longer has",
                first_few(missing, 5),
            )

    @classmethod
    def reshard(cls, states: Sequence[Reading], world_size: int) -> list[Reading]:
        return [states[0]] * world_size

    # -- the objects ------------------------------------------------------------------------------------------------

    def _holders(self) -> Iterator[tuple[str, nn.Module | Optimizer]]:
        seen: set[nn.Module] = set()
        for root, thing in self._roots.items():
            if isinstance(thing, nn.Module):
                for name, module in thing.named_modules(seen):
                    yield strip_wrappers(f"{root}.{name}.").rstrip("."), module
            elif isinstance(thing, Optimizer) and not type(thing).__module__.startswith("torch.optim."):
                yield root, thing  # torch's own keep all in groups and state

    def _changed(self) -> list[tuple[str, Values, Values]]:
        """Paths whose flags differ from those at the last call, with the former and the present ones."""
        changed, has_all = [], bool(self._places)
        for path, place in self._places.items():
            if place.is_same():
                continue
            has_all &= place.has_children()
            before, place.values = place.values, self._values(place.holder, place.values)
            place.expect()
            if before != place.values:
                changed.append((path, before, place.values))
        if has_all:
            return changed
        former, self._places = self._places, {}
        for path, holder in self._holders():
            known = former.get(path)
            if known is not None and known.holder is holder:
                self._places[path] = known
                continue
            values = self._values(holder)
            self._places[path] = _Place(holder, values)
            if known is not None and known.values != values:
                changed.append((path, known.values, values))
        return changed

    @functools.cached_property
    def _left_out(self) -> dict[object, list[str]]:
        """By module: the persistent buffers that a model's ``state_dict`` omits, as those of a backbone."""
        modules = [root for root in self._roots.values() if isinstance(root, nn.Module)]
        return {module: names for root in modules for module, names in _left_out(root)}

    def _values(self, holder: nn.Module | Optimizer, former: Values | None = None) -> Values:
        return _values(holder, self._left_out.get(holder, ()), former)

    def _set(self, state: Reading) -> list[str]:
        """Returns the paths that are not here."""
        if not state:
            return []
        holders = dict(self._holders())
        for path in state.keys() & holders.keys():
            holder = holders[path]
            for name, value in state[path].items():
                if name.endswith(_REQUIRES_GRAD):
                    parameter = cast(nn.Module, holder)._parameters.get(name.removesuffix(_REQUIRES_GRAD))
                    if parameter is not None:
                        parameter.requires_grad_(value)
                elif isinstance(value, torch.Tensor):
                    _set_tensor(holder, name, value)
                else:
                    setattr(holder, name, value.copy() if isinstance(value, list | dict) else value)
        return [f"{path}.{name}" for path in state.keys() - holders.keys() for name in state[path]]


class _Place:
    """A module or the optimizer, with its flags at the last reading."""

    __slots__ = ("_children", "_plain_values", "_seen", "holder", "values")

    def __init__(self, holder: nn.Module | Optimizer, values: Values) -> None:
        self.holder = holder
        self.values = values
        self.expect()

    def expect(self) -> None:
        """Prepare the comparison with ``values``, of which thousands are made at each save."""
        held = vars(self.holder)
        plain = [name for name, value in self.values.items() if type(value) in _UNCHANGING and name in held]
        others = [value for name, value in self.values.items() if name not in held or type(value) not in _UNCHANGING]
        # An object, without contents, matters only once a flag beside it changes.
        are_idle = all(type(each) is bool or (isinstance(each, _Other) and not each.size) for each in others)
        is_simple = {"_parameters", "_modules"} <= held.keys() and are_idle
        self._plain_values = itemgetter(*plain) if plain and is_simple else None
        self._seen = None if self._plain_values is None else self._glance(held, self._plain_values)
        self._children = [*held.get("_modules", {}).values()]

    def is_same(self) -> bool:
        """Whether nothing has changed, as far as a glance tells."""
        if self._plain_values is None:
            return False
        try:
            return self._glance(vars(self.holder), self._plain_values) == self._seen and self.has_children()
        except (KeyError, RuntimeError, ValueError):  # a value is gone, or a tensor or an array now
            return False

    def has_children(self) -> bool:
        """Whether its submodules are the same."""
        return [*vars(self.holder).get("_modules", {}).values()] == self._children

    @staticmethod
    def _glance(held: Mapping[str, Any], plain_values: Callable[[Mapping[str, Any]], Any]) -> tuple[Any, ...]:
        trained = [each is not None and each.requires_grad for each in held["_parameters"].values()]
        return len(held), plain_values(held), trained


class _Small:
    """A tensor that is saved."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.copy = tensor.detach().clone()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Small) and self.copy.dtype == other.copy.dtype and torch.equal(self.copy, other.copy)


@dataclass(frozen=True, slots=True)
class _Other:
    """Anything else, which is not saved."""

    contents: int
    """The sum of a tensor's bytes; of another object, its identity."""
    size: int = 0
    """Bytes of a tensor."""
    read: tuple[int, int] | None = field(default=None, compare=False)
    """Identity and version of a tensor, when it was read."""


def _left_out(root: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    saved = root.state_dict(keep_vars=True)
    names, there = {*map(strip_wrappers, saved)}, {*map(id, saved.values())}
    for path, module in root.named_modules():
        yield (
            module,
            [
                name
                for name, buffer in module.named_buffers(recurse=False)
                if id(buffer) not in there and strip_wrappers(f"{path}.{name}" if path else name) not in names
            ],
        )


def _values(holder: nn.Module | Optimizer, left_out: Sequence[str], former: Values | None) -> Values:
    held, found = vars(holder), Values()
    if isinstance(holder, Optimizer):
        for name in held.keys() - _OF_OPTIMIZER:
            value = held[name]
            # A text or a bool is a setting, or says that the first step is done.
            if type(value) in _NUMBERS or isinstance(value, torch.Tensor):
                found[name] = _read_value(value, former, name)
        return found
    for name in held.keys() - _OF_MODULE:
        value = held[name]
        found[name] = value if type(value) in _PLAIN else _read_value(value, former, name)
    for name, parameter in holder._parameters.items():
        if parameter is not None:
            found[f"{name}{_REQUIRES_GRAD}"] = parameter.requires_grad
    for name in {*holder._non_persistent_buffers_set, *left_out}:
        found[name] = _read_value(holder._buffers.get(name), former, name)
    return found


def _read_value(value: Any, former: Values | None, name: str) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (list, tuple, dict) and len(value) <= _MOST_ITEMS:
        held = value if kind is tuple else value.copy()  # at once: another thread may change it meanwhile
        items = held.values() if kind is dict else held
        if all(type(each) in _PLAIN for each in items) and (kind is not dict or {*map(type, held)} <= {str, int}):
            return held
    if kind is not torch.Tensor or value.requires_grad or not is_plain(value):
        return _Other(id(value))
    if value.nbytes <= LARGEST:
        return _Small(value)
    before = None if former is None else former.get(name)
    read = id(value), 0 if value.is_inference() else value._version
    if isinstance(before, _Other) and before.read == read:
        return before
    return _Other(int(sum_of_bytes(value)), value.nbytes, read)


def _value_of(holder: object, name: str) -> Any:
    """What an attribute is that the holder does not have as a flag: a value of its class, a method, a submodule."""
    value = getattr(holder, name, None)
    return value if type(value) in _PLAIN else _Other(id(value))


def _is_mode(name: str) -> bool:
    return name == "training" or name.endswith(_REQUIRES_GRAD)


def _is_state(before: object, value: object) -> bool:
    """Whether a value that a module changes in each leg's first step has to be saved: a number or a tensor has."""
    if type(before) in _NUMBERS:
        return type(value) in _NUMBERS
    return isinstance(before, _Small) and isinstance(value, _Small | torch.Tensor)


def _is_saved(built: object, value: object) -> bool:
    if isinstance(built, _Small):
        return isinstance(value, _Small)
    return not isinstance(built, _Other) and not isinstance(value, _Other | _Small)


def _set_tensor(holder: object, name: str, value: torch.Tensor) -> None:
    here = getattr(holder, name, None)
    if not isinstance(here, torch.Tensor):
        return
    if (here.shape, here.dtype) == (value.shape, value.dtype):
        with torch.no_grad():
            here.copy_(value)
    else:
        setattr(holder, name, value.to(here.device, copy=True))


def _size_of(value: object) -> str:
    return f" ({format_bytes(value.size)})" if isinstance(value, _Other) and value.size else ""


def _short(value: object) -> str:
    return repr(value) if type(value) in _PLAIN else f"a {type(value).__name__.strip('_')}"


def sum_of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the tensor's bytes, as integers of 32 bits where there are as many: computed where the tensor is."""
    raw = as_bytes(tensor.detach())
    is_whole = len(raw) % 4 == 0 and raw.data_ptr() % 4 == 0
    return (raw.view(torch.int32) if is_whole else raw).sum(dtype=torch.int64)
