"""RunState: a training run's state in the terms that the files of all programs share. Source: what it is read from.

Its OptimizerContents is an optimizer's ``state_dict`` by parameter name. torch numbers the parameters in the order of
the groups. Where a program saves only the numbers, the parameters get names by position
(``checkpoint/optimizer_state.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dalsegno.checkpoint.export import SHARD_INDEX, SINGLE_FILE
from dalsegno.checkpoint.foreign import pickles
from dalsegno.checkpoint.optimizer_rows import OptimizerRows
from dalsegno.checkpoint.optimizer_state import are_positional, positional_name
from dalsegno.checkpoint.weights import Weights
from dalsegno.errors import ConfigurationError, StateMismatch
from dalsegno.stateful.component import State

_ADDED = {"params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
"""Keys of a parameter group that are not its optimizer's arguments."""


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
        """Convert the result of ``optimizer.state_dict()``, by number or (as DCP's) by FQN. Raises StateMismatch if
        ``saved`` is not an optimizer's state; ConfigurationError if the class is unknown.

        Args:
            saved: ``state`` and ``param_groups``.
            class_name: the optimizer's class; None: inferred from its hyperparameters, if it is one of torch's.
            rename: applied to FQNs.
            where: the file, for messages.
        """
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
        """Names of all parameters, in the order of the groups."""
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
        for name in self.names:
            if name not in self.state:
                continue
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
        """Whether the position within the epoch is known."""
        return self.fraction is not None or self.microbatches is not None

    @property
    def position(self) -> float:
        """Passes over the data, as far as known."""
        return self.epoch + (self.fraction or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run after ``step`` optimizer steps. Tensors are full tensors on the CPU.

    Attributes:
        program: the program whose files these are.
        step: finished optimizer steps.
        model: tensors by FQN, each tied tensor once.
        tied: further name of a tied tensor to its name in ``model``, as far as known.
        schedulers: ``state_dict`` of each learning rate schedule.
        settings: of a run here, by their names in ``TrainingArguments``; for an export.
        world_size: number of ranks.
        left_out: parts that are missing in the files, or have no place in a run here, and why.
    """

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
        """Raises ConfigurationError if there is none."""
        if self.optimizer is None:
            raise ConfigurationError(f"the checkpoint contains no optimizer, without which {program} cannot resume")
        return self.optimizer

    def further_schedulers(self) -> dict[str, str]:
        """The reason for which each schedule after the first is left out."""
        return {f"scheduler.{number}": "there is a place for one" for number in range(1, len(self.schedulers))}


# --- what an import reads -------------------------------------------------------------------------------------------


_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to all names."""
_PICKLED_WEIGHTS = "pytorch_model.bin"
_ADAPTER = "adapter_model.safetensors"
_CALLBACK = "its state has no meaning for a callback here"
_MOST = 2**53


@dataclass(frozen=True, slots=True)
class Source:
    """
    Attributes:
        path: folder or file.
        step: finished optimizer steps; None: as saved.
        epoch: passes over the data; None: as saved.
        strip_prefix: removed from the names of the model's tensors; others are left out.
        optimizer: class of the optimizer, as ``module.Class``; None: inferred.
    """

    path: Path
    step: int | None = None
    epoch: float | None = None
    strip_prefix: str = ""
    optimizer: str | None = None

    def __post_init__(self) -> None:
        for name, value in ("step", self.step), ("epoch", self.epoch):
            if value is not None and not 0 <= value < _MOST:  # which NaN is not, either
                raise ConfigurationError(f"{name}={value!r}; needs a finite number of at least 0")

    def load_weights(self) -> Mapping[str, Any]:
        """The model's tensors in a folder, as safetensors or else pickled. Raises ConfigurationError if there is no
        whole model."""
        path = self.path
        if (path / SINGLE_FILE).is_file() or (path / SHARD_INDEX).is_file():
            return Weights.open(path).read_all()
        if (path / _PICKLED_WEIGHTS).is_file():
            tensors: Mapping[str, Any] = pickles.load(path / _PICKLED_WEIGHTS)
            return tensors
        if (path / _ADAPTER).is_file():
            raise ConfigurationError(
                f"{path}: contains only the weights of an adapter ({_ADAPTER}), and no whole model; merge the adapter "
                "into its base model first, or begin a new run with the merged weights"
            )
        raise ConfigurationError(
            f"{path}: contains neither {SINGLE_FILE} nor {SHARD_INDEX} nor {_PICKLED_WEIGHTS}; weights that DeepSpeed "
            "or FSDP has sharded are not read: convert them first with that program's own tool"
        )

    def run_state(
        self,
        program: str,
        tensors: Mapping[str, Any],
        *,
        optimizer: tuple[Any, str],
        step: object = None,
        place: Place | None = None,
        schedulers: Sequence[Mapping[str, Any]] = (),
        unknown: Iterable[object] = (),
        callbacks: Iterable[object] = (),
    ) -> RunState:
        """The state that these parts make, as far as the caller has not given others. Raises StateMismatch if
        ``optimizer`` is not an optimizer's state.

        Args:
            program: its name in messages.
            tensors: of the model, by their names there. Values that are not tensors are ignored.
            optimizer: its ``state_dict`` or None, and the part of the source that contains it.
            step: finished steps, if saved; else the optimizer's own count.
            place: position in the data, if saved.
            schedulers: ``state_dict`` of each.
            unknown: names of other parts.
            callbacks: names of callbacks with a state.
        """
        saved, where = pickles.with_arrays(optimizer)
        contents = (
            OptimizerContents.of_state_dict(saved, self.optimizer, self._renamed, where) if saved is not None else None
        )
        own = {name: each for name, each in tensors.items() if isinstance(each, torch.Tensor)}
        own = {name: each.detach() for name, each in own.items() if _unwrapped(name).startswith(self.strip_prefix)}
        if not own:
            first = ", ".join(list(tensors)[:3]) or "none"
            raise ConfigurationError(
                f"strip_prefix={self.strip_prefix!r}: no tensor has such a name; they are {first} …"
            )
        tied = _tied_names(own)
        place = Place.at(self.epoch) if self.epoch is not None else place or Place()
        finished = self._step(step, contents)
        for what, value in ("step", finished), ("epoch", place.epoch), ("batches", place.microbatches or 0):
            if not (isinstance(value, int) and 0 <= value < _MOST):
                raise StateMismatch(f"{self.path}: {what}={value!r}; needs a count of at least 0; nothing was imported")
        return RunState(
            program=program,
            step=finished,
            model={self._renamed(name): each.contiguous() for name, each in own.items() if name not in tied},
            tied={self._renamed(alias): self._renamed(name) for alias, name in tied.items()},
            optimizer=contents,
            schedulers=[pickles.with_arrays(each) for each in schedulers],
            place=place,
            left_out={
                **{str(name): "unknown to a run here" for name in unknown},
                **{f"callback {name}": _CALLBACK for name in callbacks},
            },
        )

    def _step(self, saved: object, optimizer: OptimizerContents | None) -> int:
        if self.step is not None:
            return self.step
        if isinstance(saved, torch.Tensor) and saved.numel() == 1:
            return int(saved)
        if type(saved) is int:
            return saved
        counted = 0 if optimizer is None else optimizer.steps()
        if counted is None:
            raise ConfigurationError(f"{self.path}: does not contain the number of finished steps; pass step= (--step)")
        return counted

    def _renamed(self, name: str) -> str:
        return _unwrapped(name).removeprefix(self.strip_prefix)


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


Files = tuple[Sequence[Path], Mapping[str, str]]
"""Written files, and what has no place in them, with the reason."""


@dataclass(frozen=True, slots=True)
class Program:
    """The layout of a program's files.

    Attributes:
        name: in messages.
        is_at: whether a path is such a checkpoint, by names of files only.
        read: read everything that a run here can use.
        write: write what the program resumes from, with a prefix that is added to the names of tensors. The target does
            not exist, or contains the model as safetensors.
        has_safetensors: whether the model is in files of safetensors, as ``export_model`` writes them.
    """

    name: str
    is_at: Callable[[Path], bool]
    read: Callable[[Source], RunState]
    write: Callable[[RunState, Path, str], Files]
    has_safetensors: bool = False
