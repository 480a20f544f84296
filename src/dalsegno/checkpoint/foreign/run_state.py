"""RunState: a training run's state in the terms that the files of all programs share; and how it is made of a file's.

torch numbers an optimizer's parameters in the order of the groups. Where a program saves only the numbers, the
parameters get names by position (``checkpoint/optimizer_state.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dalsegno.checkpoint.foreign import pickles
from dalsegno.checkpoint.optimizer_rows import OptimizerRows
from dalsegno.checkpoint.optimizer_state import are_positional, positional_name
from dalsegno.errors import ConfigurationError, StateMismatch
from dalsegno.stateful.component import State

_ADDED = {"params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
"""Keys of a parameter group that are not its optimizer's arguments."""
_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to all names."""
MOST = 2**53


@dataclass(frozen=True, slots=True)
class OptimizerContents:
    """Hyperparameters of each group, with the names of its parameters under ``params``; state by name and kind."""

    class_name: str
    groups: Sequence[Mapping[str, Any]]
    state: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of_state_dict(
        cls, saved: Mapping[str, Any], class_name: str | None, rename: Callable[[str], str], where: str
    ) -> OptimizerContents:
        """Convert the result of ``optimizer.state_dict()``, by number or (as DCP's) by FQN, to which ``rename`` is
        applied. Without a ``class_name``, that is inferred."""
        try:
            groups = [dict(group) for group in saved["param_groups"]]
            names: dict[Any, str] = {}
            for number, group in enumerate(groups):
                known = [each if isinstance(each, str) else None for each in group["params"]]
                for position, name in enumerate(group.pop("param_names", known)):
                    given = positional_name(number, position) if name is None else rename(name)
                    names[group["params"][position]] = given
                group["params"] = [names[each] for each in group["params"]]
            state = {names[each]: dict(values) for each, values in saved["state"].items()}
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise StateMismatch(f"{where}: not the state_dict of a torch optimizer ({error!r})") from error
        return cls(class_name or _class_of(groups, where), groups, state)

    @property
    def is_by_position(self) -> bool:
        return are_positional([group["params"] for group in self.groups])

    @property
    def names(self) -> list[str]:
        return [name for group in self.groups for name in group["params"]]

    def steps(self) -> int | None:
        """The largest count of steps of any parameter; None if the optimizer counts none."""
        counts = [int(values["step"]) for values in self.state.values() if values.get("step") is not None]
        return max(counts, default=None)

    def numbered(self) -> dict[str, Any]:
        """The ``state_dict`` that torch's optimizers load: by number."""
        numbers = {name: number for number, name in enumerate(self.names)}
        return self.state_dict(numbers.__getitem__)

    def state_dict(self, key_of: Callable[[str], Any]) -> dict[str, Any]:
        """A ``state_dict`` with the key of each parameter; DCP's ``set_optimizer_state_dict`` loads one by name."""
        return {
            "state": {key_of(name): dict(self.state[name]) for name in self.names if name in self.state},
            "param_groups": [{**group, "params": [*map(key_of, group["params"])]} for group in self.groups],
        }

    def captured(self) -> tuple[dict[str, torch.Tensor], State]:
        """Tensors and rest, as a checkpoint stores them."""
        tensors: dict[str, torch.Tensor] = {}
        rows = OptimizerRows()
        for name in (each for each in self.names if each in self.state):
            plain = rows.plain[name] = {}
            for kind, value in self.state[name].items():
                if isinstance(value, torch.Tensor) and value.dim():
                    tensors[f"{name}.{kind}"] = value.contiguous()
                    rows.sharded.setdefault(name, []).append(kind)
                else:
                    plain[kind] = value
        return tensors, {**rows.by_kind(), "other": {}, "groups": [dict(group) for group in self.groups]}

    @classmethod
    def of_captured(cls, class_name: str, tensors: Mapping[str, torch.Tensor], rest: State) -> OptimizerContents:
        """The inverse of :meth:`captured`."""
        rows = OptimizerRows.of(rest)
        state = {
            name: {**plain, **{kind: tensors[f"{name}.{kind}"] for kind in rows.sharded.get(name, ())}}
            for name, plain in rows.plain.items()
        }
        return cls(class_name, rest["groups"], state)


def _class_of(groups: Sequence[Mapping[str, Any]], where: str) -> str:
    """The class of ``torch.optim`` with these hyperparameters. Adam and AdamW differ in one value."""
    own = groups[0].keys() - _ADDED
    fitting = []
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            defaults = kind([torch.zeros(1, 1)]).defaults  # type: ignore[call-arg]
            decoupled = defaults.get("decoupled_weight_decay")
            if defaults.keys() == own and decoupled == groups[0].get("decoupled_weight_decay"):
                fitting.append(kind)
    if len(fitting) != 1:
        raise ConfigurationError(
            f"{where}: does not contain the optimizer's class, and its hyperparameters ({', '.join(sorted(own))}) are "
            "not those of one optimizer of this torch; pass optimizer= (--optimizer), say torch.optim.AdamW"
        )
    return f"{fitting[0].__module__}.{fitting[0].__qualname__}"


@dataclass(frozen=True, slots=True)
class Place:
    """Position in the data. Within the epoch it is known as a fraction, as a number of micro-batches, or not at all."""

    epoch: int = 0
    """Finished epochs."""
    fraction: float | None = None
    """Consumed micro-batches of the epoch, as a fraction of all."""
    microbatches: int | None = None
    """Consumed micro-batches of the epoch, on each rank."""

    @classmethod
    def at(cls, position: float) -> Place:
        """Passes over the data, such as 1.25."""
        finished = math.floor(position + 1e-9)
        return cls(finished, max(0.0, position - finished))

    @property
    def is_known(self) -> bool:
        return self.fraction is not None or self.microbatches is not None

    @property
    def position(self) -> float:
        """Passes over the data, as far as known."""
        return self.epoch + (self.fraction or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run after ``step`` optimizer steps. Tensors are full tensors on the CPU; each tied one is in ``model``
    once, and ``tied`` has its further names. ``settings``: of a run here, for an export. ``left_out``: parts that are
    missing in the files, or have no place in a run here, and why."""

    program: str
    step: int
    model: Mapping[str, torch.Tensor]
    tied: Mapping[str, str] = field(default_factory=dict)
    optimizer: OptimizerContents | None = None
    schedulers: Sequence[Mapping[str, Any]] = ()
    place: Place = Place()
    settings: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1
    left_out: Mapping[str, str] = field(default_factory=dict)

    def state_dict(self, prefix: str) -> dict[str, torch.Tensor]:
        """The model's tensors under all their names; tied ones are the same tensor."""
        names = {**{name: name for name in self.model}, **self.tied}
        return {f"{prefix}{name}": self.model[source] for name, source in names.items()}

    def expect_optimizer(self, program: str) -> OptimizerContents:
        if self.optimizer is None:
            raise ConfigurationError(f"the checkpoint contains no optimizer, without which {program} cannot resume")
        return self.optimizer


# --- what an import reads -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """What the files of a program contain: the model's tensors by their names there, beside values that are not
    tensors; the ``optimizer``'s ``state_dict`` and its place, for messages; ``step`` and ``place``, if saved.
    ``processes``: that each advance a schedule of a function once in a step. ``program``: if the files are of another
    one than usual."""

    tensors: Mapping[str, Any]
    optimizer: tuple[Any, str]
    step: object = None
    place: Place = Place()
    schedulers: Sequence[Mapping[str, Any]] = ()
    processes: int = 1
    unknown: Iterable[object] = ()
    callbacks: Iterable[object] = ()
    program: str | None = None


def run_of(
    found: Found,
    program: str,
    path: Path,
    *,
    step: int | None,
    epoch: float | None,
    strip_prefix: str,
    optimizer: str | None,
) -> RunState:
    """The state that these parts make, as far as the caller has not given others; arguments and errors are those of
    ``import_checkpoint``."""

    def renamed(name: str) -> str:
        return _unwrapped(name).removeprefix(strip_prefix)

    saved, where = pickles.with_arrays(found.optimizer)
    contents = None if saved is None else OptimizerContents.of_state_dict(saved, optimizer, renamed, where)
    own = {name: each for name, each in found.tensors.items() if isinstance(each, torch.Tensor)}
    own = {name: each.detach() for name, each in own.items() if _unwrapped(name).startswith(strip_prefix)}
    if not own:
        first = ", ".join(list(found.tensors)[:3]) or "none"
        raise ConfigurationError(f"strip_prefix={strip_prefix!r}: no tensor has such a name; they are {first} …")
    tied = _tied_names(own)
    place = found.place if epoch is None else Place.at(epoch)
    finished = _step(found.step, contents, path) if step is None else step
    for what, value in ("step", finished), ("epoch", place.epoch), ("batches", place.microbatches or 0):
        if not (isinstance(value, int) and 0 <= value < MOST):
            raise StateMismatch(f"{path}: {what}={value!r}; needs a count of at least 0; nothing was imported")
    schedulers = [pickles.with_arrays(each) for each in found.schedulers]
    if found.processes > 1:
        counted = finished * found.processes
        schedulers = [at_step(finished, each) if each.get("last_epoch") == counted else each for each in schedulers]
    return RunState(
        program=found.program or program,
        step=finished,
        model={renamed(name): each.contiguous() for name, each in own.items() if name not in tied},
        tied={renamed(alias): renamed(name) for alias, name in tied.items()},
        optimizer=contents,
        schedulers=schedulers,
        place=place,
        left_out={
            **{str(name): "unknown to a run here" for name in found.unknown},
            **{f"callback {name}": "its state has no meaning for a callback here" for name in found.callbacks},
        },
    )


def at_step(step: int, schedule: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schedule that was advanced ``step`` times, if it is one of a function."""
    return {**schedule, "last_epoch": step, "_step_count": step + 1} if "lr_lambdas" in schedule else schedule


def _step(saved: object, optimizer: OptimizerContents | None, path: Path) -> int:
    if isinstance(saved, torch.Tensor) and saved.numel() == 1:
        return int(saved)
    if type(saved) is int:
        return saved
    counted = 0 if optimizer is None else optimizer.steps()
    if counted is None:
        raise ConfigurationError(f"{path}: does not contain the number of finished steps; pass step= (--step)")
    return counted


def _unwrapped(name: str) -> str:
    for prefix in _WRAPPERS:
        name = name.removeprefix(prefix)
    return name


def _tied_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Further name to first name of each tensor that has several: they are one place in memory."""
    first: dict[object, str] = {}
    names = {
        name: first.setdefault((each.data_ptr(), each.dtype, each.shape, each.stride()), name)
        for name, each in tensors.items()
        if each.numel()
    }
    return {name: other for name, other in names.items() if name != other}
