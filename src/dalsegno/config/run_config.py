"""RunConfig: a run from a configuration: the function that builds the trainer, its settings and callbacks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalsegno.args import TrainingArguments, answers
from dalsegno.config.document import Document, Source, error_context
from dalsegno.config.registry import CallbackEntry, build_callbacks, find_named, read_entries
from dalsegno.config.signature import signature_of
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import TrainBeginContext
from dalsegno.logs import RunFile
from dalsegno.logs.values import to_json
from dalsegno.system import filesystem

logger = logging.getLogger("dalsegno")

SINCE = "since_leg"
"""The first leg of ``run.json`` that was trained with these settings."""

SECTIONS = ("trainer", "args", "factory", "callbacks")
EXAMPLE = "def build(args, callbacks, …): return dalsegno.Trainer(model, args, callbacks=callbacks, …)"
_HANDED_OVER = ("args", "callbacks")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A run described by a file::

        trainer = "my_training:build"    # build(args, callbacks, **factory) returns the trainer

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
    _build: Callable[..., Any]

    @classmethod
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
        for key in document.tables:
            if key not in (*SECTIONS, SINCE):
                with error_context(document.name):
                    raise UnknownName("key", key, SECTIONS)
        trainer, build = _find_build(document)
        factory, factory_settings = _read_factory(document, build)
        args = _read_args(document)
        entries = read_entries(document)
        settings = {
            "trainer": trainer,
            "args": args.to_dict(),
            "factory": factory_settings,
            "callbacks": [entry.resolved() for entry in entries],
        }
        return cls(document.name, trainer, args, factory, entries, settings, build)

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
        trainer = self._build(args=self.args, callbacks=callbacks, **self.factory)
        if not callable(getattr(trainer, "train", None)):
            raise ConfigurationError(f"{self.trainer} returned a {type(trainer).__name__}, not a trainer")
        present = getattr(trainer, "callbacks", callbacks)
        for callback in callbacks:
            if callback not in present:
                raise ConfigurationError(
                    f"{self.trainer} returned a trainer without the callbacks it was given; write it as {EXAMPLE}"
                )
        return trainer


def _find_build(document: Document) -> tuple[str, Callable[..., Any]]:
    name = document.tables.get("trainer")
    if not isinstance(name, str):
        given = "is missing" if name is None else f"is {name!r}"
        raise ConfigurationError(
            f"{document.location('trainer')}: {given}; name the function that builds the trainer, "
            'trainer = "my_training:build"'
        )
    with error_context(document.location("trainer")):
        return name, find_named(name, "function", "my_training:build")


def _read_factory(document: Document, build: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checked arguments of the function beside args and callbacks; and as settings, with the defaults."""
    with error_context(document.location("trainer")):
        signature = signature_of(build)
        for name in _HANDED_OVER:
            if name not in signature and not signature.takes_others:
                raise ConfigurationError(f"has no argument {name}=; write it as {EXAMPLE}")
    for name in _HANDED_OVER:
        signature.pop(name, None)
    written = document.section("factory")
    if wrong := [name for name in _HANDED_OVER if name in written]:
        raise ConfigurationError(f"{document.location('factory', wrong[0])}: has its own section; remove it here")
    arguments = signature.check(written, lambda name: document.argument_location(name, "factory"))
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
