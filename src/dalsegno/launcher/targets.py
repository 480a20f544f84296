"""Targets: what each rank runs: a configuration, a function or a script. Outcome: what rank 0 sends back."""

from __future__ import annotations

import contextlib
import inspect
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from dalsegno.config import Factory, RunConfig
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import Callback
from dalsegno.logs import RunFile
from dalsegno.stateful.component import Stateful
from dalsegno.system.exit_status import ExitStatus
from dalsegno.training.result import TrainResult

from .parcel import Node, pack, read_private, unpack, write_private


@dataclass(frozen=True, slots=True)
class Ended:
    """How the target ended on this rank."""

    status: int
    result: TrainResult | None = None
    callbacks: Sequence[Callback] = ()
    """Those that were given to the launch, after training."""


@dataclass(frozen=True, slots=True)
class ConfigTarget:
    """``dalsegno train FILE``."""

    path: str
    overrides: Sequence[str] = ()
    checkpoint: str | None = None
    start_over: bool = False
    continue_stopped: bool = False

    def check(self) -> None:
        """Raises ConfigurationError, UnknownName or NotFound before anything starts."""
        RunConfig.read(self.path, self.overrides)

    def run(self, launched: float) -> Ended:
        """``launched``: UTC seconds at which the launch began."""
        config = RunConfig.read(self.path, self.overrides)
        trainer = config.build()
        origin: str | bool = self.checkpoint or not self.start_over
        if origin is not True and collectives.from_rank_zero(lambda: _has_saved(config.args.directory, launched)):
            origin = True  # a restart: the option has had its effect
        more = {"continue_stopped": True} if self.continue_stopped else {}
        return _ended(trainer.train(origin, **more), ())


@dataclass(frozen=True, slots=True)
class FactoryTarget:
    """A function that returns a trainer; called with ``callbacks=`` and ``arguments``, as a :class:`Factory`."""

    factory: Callable[..., Any]
    callbacks: Sequence[Callback] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        unpack(self.packed())
        self._call()

    def run(self, launched: float) -> Ended:
        return _ended(self._call()().train(), self.callbacks)

    def _call(self) -> Callable[[], Any]:
        return Factory(self.factory, _name(self.factory)).bind({"callbacks": list(self.callbacks)}, self.arguments)

    def packed(self) -> Node:
        """A dict of the fields, packed; an error names the callback or argument that cannot travel."""
        fields = {
            "factory": pack(self.factory, f"the function {_name(self.factory)}"),
            "callbacks": ["list", [pack(each, f"callbacks: {each.key}") for each in self.callbacks]],
            "arguments": pack(dict(self.arguments), "arguments"),
        }
        return ["dict", [[["value", name], node] for name, node in fields.items()]]


@dataclass(frozen=True, slots=True)
class ScriptTarget:
    """A Python file, run as ``python FILE ARGUMENT…``. Its ``sys.exit`` gives the exit status."""

    path: str
    arguments: Sequence[str] = ()

    def check(self) -> None:
        if not Path(self.path).is_file():
            raise ConfigurationError(f"{self.path}: no such file")

    def run(self, launched: float) -> Ended:
        sys.argv = [self.path, *self.arguments]
        sys.path.insert(0, str(Path(self.path).resolve().parent))
        try:
            runpy.run_path(self.path, run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            return Ended(end.code if isinstance(end.code, int) else ExitStatus.DONE if end.code is None else 1)
        return Ended(ExitStatus.DONE)


Target = ConfigTarget | FactoryTarget | ScriptTarget

KINDS: dict[str, type[Target]] = {"config": ConfigTarget, "factory": FactoryTarget, "script": ScriptTarget}


def to_tree(target: Target) -> dict[str, Any]:
    """A tree that the codec can encode."""
    kind = next(name for name, each in KINDS.items() if isinstance(target, each))
    packed = target.packed() if isinstance(target, FactoryTarget) else pack(asdict(target), kind)
    return {"kind": kind, "target": packed}


def from_tree(tree: Any) -> Target:
    return KINDS[tree["kind"]](**unpack(tree["target"]))


def name_of(target: Target) -> str:
    """What it runs, without its arguments."""
    return _name(target.factory) if isinstance(target, FactoryTarget) else target.path


def _ended(result: Any, callbacks: Sequence[Callback]) -> Ended:
    if not isinstance(result, TrainResult):  # a trainer of another kind
        return Ended(ExitStatus.DONE)
    return Ended(result.exit_status, result, callbacks)


def _has_saved(output_dir: Path, launched: float) -> bool:
    """Whether a leg that began since ``launched`` has published a checkpoint."""
    record = RunFile(output_dir).load()
    return record is not None and any(leg.started >= launched and leg.last_step > leg.first_step for leg in record.legs)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", function))


_NAME = "outcome.json"


def write_outcome(folder: Path, result: TrainResult | None, callbacks: Sequence[Callback]) -> None:
    """Write the result, and each callback's state; without ``state_dict``, its attributes as far as they can travel."""
    states = [_state(each) for each in callbacks]
    write_private(folder / _NAME, {"result": pack(result, "the result"), "callbacks": states})


def read_outcome(folder: Path, callbacks: Sequence[Callback]) -> TrainResult | None:
    """Read the result, and load the states into ``callbacks``, as if they had been trained with in this process."""
    try:
        outcome: Any = read_private(folder / _NAME)
    except FileNotFoundError:
        return None
    for callback, content in zip(callbacks, outcome["callbacks"], strict=True):
        if isinstance(callback, Stateful):
            callback.load_state_dict(content["state"])
        bare = inspect.unwrap(cast(Any, callback))  # one of another library is behind its adapter
        for name, node in content["attributes"].items():
            setattr(bare, name, unpack(node))
    return cast(TrainResult | None, unpack(outcome["result"]))


def _state(callback: Callback) -> dict[str, Any]:
    if isinstance(callback, Stateful):
        return {"state": callback.state_dict(), "attributes": {}}
    attributes = {}
    for name, value in vars(inspect.unwrap(cast(Any, callback))).items():
        if name != "construction":
            with contextlib.suppress(ConfigurationError):
                attributes[name] = pack(value, name)
    return {"state": None, "attributes": attributes}
