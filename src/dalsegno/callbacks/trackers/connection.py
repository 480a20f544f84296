"""Connection: ``tracker.json`` beside an outbox, by which its entries can be sent without the program that logged them.

It contains the tracker's arguments, the environment variables and the working directory that determine where its client
writes, and the run's description; no secrets. The file may come from elsewhere: of environment variables, only those in
:attr:`Tracker.variables` are read from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from dalsegno.errors import NotFound, StateMismatch, UnknownName
from dalsegno.stateful import schema
from dalsegno.system import filesystem

from .privacy import HIDDEN, public
from .tracker import TrackedRun, Tracker

_FILE = "tracker.json"

_Variable = Annotated[str, schema.Must("a text without NUL", lambda text: b"\0" not in os.fsencode(text))]


class _StoredRun(TypedDict):
    id: str
    name: str
    settings: dict[str, Any]
    code: dict[str, str]


class _Stored(TypedDict):
    tracker: str
    arguments: dict[str, Any]
    variables: dict[str, _Variable]
    working_directory: str
    run: _StoredRun


@dataclass(frozen=True, slots=True)
class Connection:
    tracker: str
    """``wandb`` or ``mlflow``."""
    arguments: Mapping[str, Any]
    """Of the :class:`~dalsegno.callbacks.trackers.tracker.Tracker`: JSON values."""
    variables: Mapping[str, str]
    working_directory: str
    run: TrackedRun

    def write(self, directory: Path) -> None:
        """Raises OSError if the file cannot be written."""
        content = asdict(self) | {"arguments": _stored(self.arguments), "variables": _stored(self.variables)}
        content["run"] = {name: value for name, value in content["run"].items() if name != "directory"}
        path = directory / _FILE
        data = json.dumps(content, indent=1).encode()
        if not path.exists() or path.read_bytes() != data:
            filesystem.replace_durably(path, data)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """As in the process that logged: in its working directory, if it still exists, and with its variables, unless
        they are set here.

        Raises:
            StateMismatch: if an argument or a variable contained a secret, which is not stored.
        """
        for name, value in {**self.arguments, **self.variables}.items():
            if HIDDEN in str(value) and name not in os.environ:
                raise StateMismatch(
                    f"{name} of {self.tracker} contained a secret, which is not stored; run the program again: it "
                    "sends what waits"
                )
        directory, missing = Path.cwd(), {*self.variables} - {*os.environ}
        if Path(self.working_directory).is_dir():
            os.chdir(self.working_directory)
        os.environ.update({name: self.variables[name] for name in missing})
        try:
            yield
        finally:
            os.chdir(directory)
            for name in missing:
                del os.environ[name]


def variables_here(names: Sequence[str]) -> dict[str, str]:
    """Return those of the environment variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def read_connection(outbox: Path, logs: Path, trackers: Mapping[str, type[Tracker]]) -> Connection:
    """
    Args:
        outbox: directory of the outbox.
        logs: directory for files that the client writes.
        trackers: by name.

    Raises:
        NotFound: if there is no ``tracker.json``.
        StateMismatch: if it is damaged, or contains a variable that is not the tracker's.
        UnknownName: if ``trackers`` does not contain its tracker.
    """
    path = outbox / _FILE
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFound(f"{path}: not there; run the program again: it sends what waits") from None
    except (ValueError, RecursionError) as error:
        raise StateMismatch(f"{path} is damaged ({error}); run the program again: it sends what waits") from error
    schema.check(content, _Stored, f"{path}: damaged")
    if content["tracker"] not in trackers:
        raise UnknownName("tracker", content["tracker"], [*trackers])
    if foreign := {*content["variables"]} - {*trackers[content["tracker"]].variables}:
        raise StateMismatch(
            f"{path} sets {', '.join(sorted(foreign))}, which {content['tracker']} does not need: dalsegno did not "
            "write this file. Nothing is sent; run the program again: it sends what waits"
        )
    run = TrackedRun(**content.pop("run"), directory=logs)
    return Connection(**content, run=run)


def _stored(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without secrets. A URL loses its user and password: clients also read them elsewhere."""
    hidden = public(values)
    return {
        name: value.replace(f"{HIDDEN}@", "") if isinstance(value, str) else value for name, value in hidden.items()
    }
