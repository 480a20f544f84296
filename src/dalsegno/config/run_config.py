"""Factory: the user's function that builds a trainer. RunConfig: one with its settings and callbacks, from a file."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dalsegno.args import TrainingArguments, answers
from dalsegno.config.document import Document, Source, error_context
from dalsegno.config.registry import CallbackEntry, build_callbacks, find_named, read_entries
from dalsegno.config.signature import Signature, signature_of
from dalsegno.errors import ConfigurationError, expect_known
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import TrainBeginContext
from dalsegno.logs import RunFile
from dalsegno.logs.values import to_json
from dalsegno.stateful.annotations import check_types
from dalsegno.system import filesystem

logger = logging.getLogger("dalsegno")

SINCE = "since_leg"
"""The first leg of ``run.json`` that was trained with these settings."""

SECTIONS = ("trainer", "args", "factory", "callbacks")
EXAMPLE = "def build(args, callbacks, …): return dalsegno.Trainer(model, args, callbacks=callbacks, …)"
_HANDED_OVER = {
    "args": "it is of a configuration: give that (run.toml with trainer = …) in place of the function, or a default",
    "callbacks": "give it a default, or callbacks to ds.launch",
    "output_dir": "give it a default, or a value: output_dir=runs/a after its name, or in arguments= of ds.launch",
}
"""What a function gets from its caller; and what to do if the caller does not have it."""
_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Factory:
    """A function that builds a trainer: ``def build(args, callbacks, output_dir, width=64)``.

    It gets by name what it takes of the first three, as far as its caller has them, and arguments of its own.
    """

    function: Callable[..., Any]
    name: str

    @classmethod
    def find(cls, name: str) -> Factory:
        """``module:function``."""
        return cls(find_named(name, "function", "my_training:build"), name)

    def check(self, written: Mapping[str, Any], location: Callable[[str], str]) -> tuple[dict[str, Any], Signature]:
        """Its own arguments as its annotations demand, and their signature."""
        signature = signature_of(self.function)
        for name in _HANDED_OVER.keys() - written.keys():
            signature.pop(name, None)
        return signature.check(written, location), signature

    def bind(self, given: Mapping[str, Any], own: Mapping[str, Any], location: str | None = None) -> Callable[[], Any]:
        """The call; it raises ConfigurationError if it returns something other than a trainer.

        Args:
            given: what the caller has of ``args``, ``callbacks`` and ``output_dir``. No callbacks leave a default.
                Without ``args``, which have it, the ``output_dir`` may be a first parameter of another name.
            own: its own arguments.
            location: for error messages; None: its name.
        """
        parameters = inspect.signature(self.function).parameters
        if "args" in given and "output_dir" not in parameters:
            given = {name: value for name, value in given.items() if name != "output_dir"}
        takes_others = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        required = [
            each.name for each in parameters.values() if each.default is each.empty and each.kind not in _COLLECTING
        ]
        named = dict(own)
        with error_context(location or self.name):
            for name, value in given.items():
                known = _first_other(parameters) if name == "output_dir" and name not in parameters else name
                if known in parameters or takes_others:
                    if value or known in required:
                        named.setdefault(known, value)
                elif value and not ("args" in required and "args" not in given):
                    wanted = ", ".join(name for name, value in given.items() if value)
                    raise ConfigurationError(f"has no argument {name}=; write it as def build({wanted}, …)")
            if not takes_others:
                expect_known("argument", named, parameters)
            for name in required:
                if name not in named:
                    raise ConfigurationError(f"{name}= is missing; {_HANDED_OVER.get(name, 'give it a default')}")
        return partial(self._build, named)

    def _build(self, arguments: Mapping[str, Any]) -> Any:
        trainer = self.function(**arguments)
        if not callable(getattr(trainer, "train", None)):
            raise ConfigurationError(f"{self.name} returned a {type(trainer).__name__}, not a trainer")
        return trainer


def _first_other(parameters: Mapping[str, inspect.Parameter]) -> str:
    """The first parameter, if an ``output_dir`` of another name it may be."""
    first = next(iter(parameters.values()), None)
    if first is None or first.name in _HANDED_OVER or first.kind is not first.POSITIONAL_OR_KEYWORD:
        return "output_dir"
    return first.name if first.default is first.empty or isinstance(first.default, str | Path) else "output_dir"


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A run described by a file::

        trainer = "my_training:build"    # build(args, callbacks, **factory) returns the trainer; see Factory

        [args]                           # TrainingArguments
        [factory]                        # further arguments of build
        [[callbacks]]                    # use = "…", and arguments

    :meth:`read` checks the whole file and builds nothing.
    """

    source: str
    trainer: str
    args: TrainingArguments
    factory: dict[str, Any]
    entries: list[CallbackEntry]
    settings: dict[str, Any]
    """The whole configuration with every default, as in ``config.json``."""
    _build: Factory

    @classmethod
    @check_types
    def read(cls, source: Source, overrides: Iterable[str] = ()) -> RunConfig:
        """Read a TOML, YAML or JSON file or a dict; ``overrides`` are ``key=value``, as for ``--set``.

        Raises:
            NotFound: if the file does not exist.
            ConfigurationError: for an invalid value; the message gives its location.
            UnknownName: for an unknown name; suggests the nearest.
        """
        document = Document.read(source)
        for assignment in overrides:
            document.set(assignment, SECTIONS)
        with error_context(document.name):
            expect_known("key", (key for key in document.tables if key != SINCE), SECTIONS)
        name = document.tables.get("trainer")
        if not isinstance(name, str):
            given = "is missing" if name is None else f"is {name!r}"
            raise ConfigurationError(
                f"{document.location('trainer')}: {given}; name the function that builds the trainer, "
                'trainer = "my_training:build"'
            )
        with error_context(document.location("trainer")):
            build = Factory.find(name)
        factory, factory_settings = _read_factory(document, build)
        args = _read_args(document)
        entries = read_entries(document)
        settings = {
            "trainer": build.name,
            "args": args.to_dict(),
            "factory": factory_settings,
            "callbacks": [entry.resolved() for entry in entries],
        }
        return cls(document.name, build.name, args, factory, entries, settings, build)

    def as_json(self) -> str:
        """Every setting as JSON, which :meth:`read` accepts."""
        return json.dumps(to_json(self.settings), indent=2, allow_nan=False)

    def callbacks(self) -> list[Callback]:
        """Build the callbacks, and one that writes the settings to the run's ``config.json``."""
        return [*build_callbacks(self.entries, self.source), ConfigRecord(self.settings)]

    def build(self) -> Any:
        """Build the trainer.

        Raises:
            ConfigurationError: if the function returns something else, or a trainer without the callbacks.
        """
        callbacks = self.callbacks()
        given = {"args": self.args, "callbacks": callbacks, "output_dir": self.args.directory}
        trainer = self._build.bind(given, self.factory)()
        present = getattr(trainer, "callbacks", callbacks)
        for callback in callbacks:
            if callback not in present:
                raise ConfigurationError(
                    f"{self.trainer} returned a trainer without the callbacks it was given; write it as {EXAMPLE}"
                )
        return trainer


def _read_factory(document: Document, build: Factory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checked arguments of the function beside those that it is given; and as settings, with the defaults."""
    written = document.section("factory")
    if wrong := [name for name in ("args", "callbacks") if name in written]:
        raise ConfigurationError(f"{document.location('factory', wrong[0])}: has its own section; remove it here")
    arguments, signature = build.check(written, lambda name: document.argument_location(name, "factory"))
    build.bind(dict.fromkeys(_HANDED_OVER, True), arguments, document.location("trainer"))
    return arguments, signature.defaults() | written


def _read_args(document: Document) -> TrainingArguments:
    written = document.section("args")
    signature = signature_of(TrainingArguments)
    arguments = signature.check(
        written, lambda name: document.argument_location(name, "args"), answers(signature, "Trainer")
    )
    with error_context(document.location("args")):
        return TrainingArguments(**arguments)


class ConfigRecord(Callback):
    """Writes the resolved configuration to ``<output_dir>/config.json``, which ``dalsegno train`` accepts.

    A leg whose settings differ from the previous leg's moves the file to ``config.json.0001`` (``.0002``, …) first.
    """

    sets_control_flags = False
    ranks = "zero"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        path = ctx.args.directory / "config.json"
        settings = to_json(self._settings)
        former, since = _former(path)
        if former == settings:
            return
        if former is not None and _without_paths(former) != _without_paths(settings):
            since = None
            aside = filesystem.numbered(path.parent, path.name)
            filesystem.rename(path, aside)
            logger.warning("the configuration differs from the previous leg's, which is now in %s", aside)
        if since is None:
            run = RunFile(path.parent).load()
            since = run.legs[-1].leg if run and run.legs else 1
        content = {**settings, SINCE: since}
        filesystem.replace_durably(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def _former(path: Path) -> tuple[dict[str, Any] | None, Any]:
    """The settings in the file and their first leg; (None, None) without a file, ({}, None) for an unreadable one."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None, None
    except ValueError:
        return {}, None
    if not isinstance(content, dict):
        return {}, None
    return {key: value for key, value in content.items() if key != SINCE}, content.get(SINCE)


def _without_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without the run's paths: a run that was moved has the same settings."""
    args = settings.get("args")
    if not isinstance(args, dict):
        return settings
    return {**settings, "args": {key: args[key] for key in args.keys() - {"output_dir", "local_dir"}}}
