"""Component: one named object whose state a checkpoint contains.

Any object with ``state_dict`` and ``load_state_dict`` (torch's ``Stateful`` protocol) can be a component. Optional
attributes of the object control how its state is saved and loaded:

===================  ===============================================================================================
``state_scope``      ``"replicated"`` (default): the same on all ranks; rank 0's is saved and loaded by every rank.
                     ``"per_rank"``: each rank saves and loads its own.
``state_version``    int, default 1: the version that ``state_dict`` writes.
``state_schema``     type of a valid state (:mod:`dalsegno.stateful.schema`). A saved state that does not match is
                     refused before anything is loaded. It applies to the ``state_dict`` of the same class: a subclass
                     that overrides ``state_dict`` has no schema until it declares one.
``check_state``      ``check_state(state)``: raises StateMismatch for a state that matches the schema but does not fit
                     this object; also called before anything is loaded.
``migrate``          ``migrate(state, from_version) -> state``: upgrades an older state before it is loaded.
``reshard``          ``reshard(states, world_size) -> states``: converts per-rank states, one per old rank, to another
                     world size. Without it, a per-rank state cannot be loaded at another world size. Ranks that read
                     the same data count as one.
``reshard_note``     describes the effect of ``reshard`` in the report.
``precedes_tensors`` True: loaded before all tensors, since it determines which there are.
``aliases``          earlier keys of the same object.
``ranks``            ``"zero"``: active on rank 0 only, so its state is not compared across ranks.
``state_compared``   False: only rank 0 knows the state (e.g. of a file it writes), so it is not compared either.
``state_rehearsed``  False: calling ``state_dict`` has side effects, as in some dialects, so it is not called before
                     training to find out whether the state can be saved.
``state_varies``     names of fields in which two equal runs may differ, such as random ids; ``"writer.id"`` is a field
                     in a field. ``dalsegno.testing`` does not compare them.
``make_durable``     ``make_durable()``: fsyncs what the state refers to, such as a file that the object wrote.
                     Called on another thread, after ``state_dict`` and before the checkpoint is published; training
                     does not wait for it. Not called for a memory checkpoint: ``state_dict`` flushes to the kernel.
===================  ===============================================================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MemberDescriptorType, MethodType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard, cast, runtime_checkable

from dalsegno.errors import ConfigurationError, StateMismatch

from . import schema

if TYPE_CHECKING:
    from torch import Tensor, nn

State = Any
"""A tree of supported values: dict, list, tuple, str, bytes, bool, int, float, None, arrays, tensors."""

Scope = Literal["replicated", "per_rank"]


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored (same methods as torch's protocol)."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> object: ...


def is_stateful(thing: object) -> TypeGuard[Stateful]:
    """Whether an object has both methods. Reads no property and calls nothing: for walks over objects."""
    places = [own_attributes(thing), *map(vars, type(thing).__mro__)]  # inspect.getattr_static takes 15 times as long
    found = (next((each[name] for each in places if name in each), None) for name in ("state_dict", "load_state_dict"))
    return all(value is not None for value in found)


def own_attributes(thing: object) -> dict[str, Any]:
    """The attributes of an object itself, without asking its class for them."""
    try:
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return own if isinstance(own, dict) else {}


def held_attributes(thing: object) -> dict[str, Any]:
    """As :func:`own_attributes`, and those in slots."""
    held = dict(own_attributes(thing))
    for name, slot in [each for kind in type(thing).__mro__ for each in vars(kind).items()]:
        if type(slot) is MemberDescriptorType and not name.startswith("__"):  # as a function's globals are
            with suppress(AttributeError):  # empty
                held[name] = slot.__get__(thing)
    return held


def stateful_behind(function: object) -> Stateful | None:
    """The object with a state that is called as ``function``: itself, or that of a method or a ``functools.partial``.
    None for a method of a module: its state is a model's."""
    owner = function
    while isinstance(owner, partial | MethodType):
        owner = owner.func if isinstance(owner, partial) else owner.__self__
    is_model = owner is not function and hasattr(owner, "named_parameters")
    return owner if is_stateful(owner) and not is_model else None


@runtime_checkable
class TensorHolder(Protocol):
    """An object with tensors as large as a model's; each rank saves and loads its own shards of them.

    These methods replace ``state_dict`` and ``load_state_dict``.
    """

    def sharded_state(self, model: nn.Module) -> tuple[dict[str, Tensor], State]:
        """Return the tensors by name, as DTensors if sharded, and the other state, equal on every rank.

        Also called before a checkpoint is loaded: loading writes into the returned tensors. An object that does not
        always have tensors also defines ``tensors_to_load(model, rest)``, which is called then instead and returns the
        tensors that belong to ``rest``, the other saved state.
        """

    def load_sharded_state(self, names: Collection[str], rest: State) -> object:
        """Called once the tensors ``names`` contain their saved values; ``rest`` is the other saved state."""


@dataclass(frozen=True, slots=True)
class Component:
    """The state of ``target``, saved under ``key``. Keys of callbacks begin with ``callbacks.``."""

    key: str
    target: Stateful
    check: Callable[[State, str], object] | None = None
    """Raises StateMismatch for a malformed state, for a target without ``state_schema``."""

    def __post_init__(self) -> None:
        if self.scope not in ("replicated", "per_rank"):
            raise ConfigurationError(
                f"{self.key}: state_scope is {self.scope!r}; allowed are 'replicated' and 'per_rank'"
            )

    @property
    def class_name(self) -> str:
        return class_name_of(inspect.unwrap(cast(Any, self.target)))  # an adapted callback keeps that of its own class

    @property
    def scope(self) -> Scope:
        return cast(Scope, getattr(self.target, "state_scope", "replicated"))

    @property
    def version(self) -> int:
        return int(getattr(self.target, "state_version", 1))

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys under which a saved state may be found, the current one first."""
        prefix, dot, _ = self.key.rpartition(".")
        return (self.key, *(f"{prefix}{dot}{alias}" for alias in getattr(self.target, "aliases", ())))

    @property
    def compared(self) -> bool:
        """Whether the state must be equal on all ranks; a difference is logged as a warning."""
        only_zero_knows = getattr(self.target, "ranks", "all") == "zero"
        asked = getattr(self.target, "state_compared", not only_zero_knows)
        return self.scope == "replicated" and asked

    @property
    def varies(self) -> tuple[str, ...]:
        return varying_fields(self.target)

    @property
    def rehearsed(self) -> bool:
        """Whether ``state_dict`` may be called without a save."""
        return bool(getattr(self.target, "state_rehearsed", True))

    @property
    def precedes_tensors(self) -> bool:
        """Whether the state is loaded before all tensors."""
        return bool(getattr(self.target, "precedes_tensors", False))

    def capture(self) -> State:
        return self.target.state_dict()

    def take_warning(self) -> str | None:
        """What the user has to know of this rank's state, as :meth:`capture` has found it; None if nothing is new."""
        take = getattr(self.target, "take_warning", None)
        return None if take is None else cast("str | None", take())

    def make_durable(self) -> None:
        """Fsync what the state refers to outside the checkpoint. Called on any thread."""
        make_durable = getattr(self.target, "make_durable", None)
        if make_durable is not None:
            make_durable()

    def upgrade(self, state: State, version: int) -> State:
        """Convert ``state``, written by version ``version`` of this component, to the current version. Raises
        StateMismatch if ``version`` is newer than the current one, or older and there is no ``migrate``."""
        if version > self.version:
            raise StateMismatch(
                f"{self.key}: the saved state has version {version}, {self.class_name} knows up to {self.version}; "
                "resume with the code that wrote it, or newer"
            )
        if version < self.version:
            migrate = getattr(self.target, "migrate", None)
            if migrate is None:
                raise StateMismatch(
                    f"{self.key}: the saved state has version {version}, {self.class_name} writes {self.version}; "
                    "give the class a method migrate(state, from_version) that upgrades it"
                )
            state = migrate(state, version)
        return state

    def check_form(self, state: State, where: str) -> None:
        """Raises StateMismatch if ``state`` does not match the declared schema; ``where`` prefixes the message."""
        form = declared_schema(self.target)
        if self.check is not None:
            self.check(state, where)
        elif form is not None:
            schema.check(state, form, where)

    def check_fit(self, state: State) -> None:
        """Raises StateMismatch if ``check_state`` of the target rejects ``state``."""
        check_state = getattr(self.target, "check_state", None)
        if check_state is not None:
            check_state(state)

    def reshard(self, states: Sequence[State], world_size: int) -> list[State]:
        """Convert per-rank states of another world size to one state for each of ``world_size`` ranks. Raises
        StateMismatch if the target has no ``reshard``."""
        reshard = getattr(self.target, "reshard", None)
        if reshard is None:
            raise StateMismatch(
                f"{self.key}: its state is per rank and was saved by {len(states)} ranks, now there are {world_size}; "
                f"give {self.class_name} a classmethod reshard(states, world_size), or resume with {len(states)}"
            )
        return list(reshard(states, world_size))


def class_name_of(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def short_class_name(class_name: str) -> str:
    """A class name without the modules inside its package, which a library may rename: ``torch.AdamW``."""
    return f"{class_name.partition('.')[0]}.{class_name.rpartition('.')[2]}"


def varying_fields(target: object) -> tuple[str, ...]:
    """Return the fields of the target's state in which two equal runs may differ."""
    return tuple(getattr(target, "state_varies", ()))


def declared_schema(target: object) -> schema.Form:
    """Return the ``state_schema`` of the class that defines ``state_dict``; None if that class has none."""
    for names in (vars(target) if hasattr(target, "__dict__") else {}, *map(vars, type(target).__mro__)):
        if "state_schema" in names:
            return names["state_schema"]
        if "state_dict" in names or "sharded_state" in names:
            return None
    return None
