"""Component: one named thing whose state a checkpoint holds.

Whatever has ``state_dict`` and ``load_state_dict`` (torch's ``Stateful`` protocol) can be one. How its state travels
is read from the object itself, by attributes that it may have or lack:

===================  ===============================================================================================
``state_scope``      ``"replicated"`` (default): the same on all ranks, rank 0's is saved and given to every rank.
                     ``"per_rank"``: each rank saves and gets its own.
``state_version``    int, default 1: the version that ``state_dict`` writes.
``state_schema``     the form of a state, as a type (:mod:`dalsegno.stateful.schema`). A saved state of another form is
                     refused before anything is loaded. It is that of the same class's ``state_dict``: a subclass with
                     a ``state_dict`` of its own has none until it says one.
``check_state``      ``check_state(state)``: raises StateMismatch for a state of the right form that does not fit here,
                     also before anything is loaded.
``migrate``          ``migrate(state, from_version) -> state``: upgrades an older state before it is loaded.
``reshard``          ``reshard(states, world_size) -> states``: per-rank states, one for each old rank, onto another
                     number of ranks. Without it, a per-rank state cannot follow a change of world size.
``reshard_note``     what ``reshard`` amounts to, for the report.
``aliases``          keys under which the same thing was saved in former times.
``ranks``            ``"zero"``: acts on rank 0 only, so that its state is not compared between ranks.
``state_compared``   False: only rank 0 knows the state (a file that it writes), so it is not compared either.
``state_rehearsed``  False: ``state_dict`` is an event to the object, as in some dialects, so it is not called to find
                     out before training whether its state can be saved.
``make_durable``     ``make_durable()``: forces what the state refers to, a file it has written for one, to the disk.
                     Called on another thread, after ``state_dict`` and before the checkpoint is published; training
                     does not wait for it.
===================  ===============================================================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, runtime_checkable

from dalsegno.errors import ConfigurationError, StateMismatch

from . import schema

if TYPE_CHECKING:
    from torch import Tensor, nn

State = Any
"""A tree of what the codec takes: dict, list, tuple, str, bytes, bool, int, float, None, arrays, tensors."""

Scope = Literal["replicated", "per_rank"]


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be taken and given back (the same shape as torch's protocol)."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> object: ...


@runtime_checkable
class TensorHolder(Protocol):
    """Has tensors that are as large as a model's: where they are in shards, each rank saves and gets its part alone.

    That takes the place of ``state_dict`` and ``load_state_dict``.
    """

    def sharded_state(self, model: nn.Module) -> tuple[dict[str, Tensor], State]:
        """The tensors by name, DTensors where they are in shards, and the rest, which is the same on every rank.

        Asked for before a checkpoint is loaded, too: it is loaded into these very tensors.
        """
        ...

    def load_sharded_state(self, names: Collection[str], rest: State) -> object:
        """The tensors of these names hold what was saved of them, and ``rest`` is what was saved beside them."""
        ...


@dataclass(frozen=True, slots=True)
class Component:
    """``target``'s state under ``key``. Keys of callbacks begin with ``callbacks.``."""

    key: str
    target: Stateful
    check: Callable[[State, str], object] | None = None
    """Raises StateMismatch for a state that has not the right form: for a target that has no ``state_schema``."""

    def __post_init__(self) -> None:
        if self.scope not in ("replicated", "per_rank"):
            raise ConfigurationError(
                f"{self.key}: state_scope is {self.scope!r}; allowed are 'replicated' and 'per_rank'"
            )

    @property
    def class_name(self) -> str:
        kind = type(inspect.unwrap(cast(Any, self.target)))  # an adapted callback is still known by its own class
        return f"{kind.__module__}.{kind.__qualname__}"

    @property
    def scope(self) -> Scope:
        return cast(Scope, getattr(self.target, "state_scope", "replicated"))

    @property
    def version(self) -> int:
        return int(getattr(self.target, "state_version", 1))

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key under which a saved state may be found, the present one first."""
        prefix, dot, _ = self.key.rpartition(".")
        return (self.key, *(f"{prefix}{dot}{alias}" for alias in getattr(self.target, "aliases", ())))

    @property
    def compared(self) -> bool:
        """Whether the state must be the same on all ranks, so that a difference is worth a warning."""
        only_zero_knows = getattr(self.target, "ranks", "all") == "zero"
        asked = getattr(self.target, "state_compared", not only_zero_knows)
        return self.scope == "replicated" and asked

    @property
    def rehearsed(self) -> bool:
        """Whether the state may be taken when nothing is saved."""
        return bool(getattr(self.target, "state_rehearsed", True))

    def capture(self) -> State:
        return self.target.state_dict()

    def make_durable(self) -> None:
        """Force what the state refers to, beside what it holds, to the disk. On any thread."""
        make_durable = getattr(self.target, "make_durable", None)
        if make_durable is not None:
            make_durable()

    def upgrade(self, state: State, version: int) -> State:
        """``state``, which version ``version`` of this component has written, as the present version writes it.

        Raises:
            StateMismatch: if that version is a newer one, or an older one that nothing upgrades.
        """
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
        """
        Raises:
            StateMismatch: if ``state`` has not the form that the target has given; ``where`` is for the message.
        """
        form = own_form(self.target)
        if self.check is not None:
            self.check(state, where)
        elif form is not None:
            schema.check(state, form, where)

    def check_fit(self, state: State) -> None:
        """
        Raises:
            StateMismatch: if the target sees that ``state``, though of the right form, is not one for it.
        """
        check_state = getattr(self.target, "check_state", None)
        if check_state is not None:
            check_state(state)

    def reshard(self, states: Sequence[State], world_size: int) -> list[State]:
        """One state for each of ``world_size`` ranks, made from the states of another number of ranks.

        Raises:
            StateMismatch: if the target has no ``reshard``.
        """
        reshard = getattr(self.target, "reshard", None)
        if reshard is None:
            raise StateMismatch(
                f"{self.key}: its state is per rank and was saved by {len(states)} ranks, now there are {world_size}; "
                f"give {self.class_name} a classmethod reshard(states, world_size), or resume with {len(states)}"
            )
        return list(reshard(states, world_size))


def own_form(target: object) -> schema.Form:
    """What the class says whose ``state_dict`` it is; None if that says nothing."""
    for names in (vars(target) if hasattr(target, "__dict__") else {}, *map(vars, type(target).__mro__)):
        if "state_schema" in names:
            return names["state_schema"]
        if "state_dict" in names or "sharded_state" in names:
            return None
    return None
