"""Document: the tables of a configuration, and the location of each value for error messages."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dalsegno.errors import ConfigurationError, DalsegnoError, NotFound, expect_known
from dalsegno.logs.values import from_json
from dalsegno.system.imports import how_to_install

Source = str | Path | Mapping[str, Any]
"""A TOML, YAML or JSON file, or a dict with the same contents."""


class Document:
    """Tables of a file or a dict. Overrides are kept with their origin, for error messages."""

    def __init__(self, name: str, tables: Mapping[str, Any]) -> None:
        self.name = name
        self.tables: dict[str, Any] = copy.deepcopy(dict(tables))
        self._set: dict[tuple[str | int, ...], str] = {}

    @classmethod
    def read(cls, source: Source) -> Document:
        """
        Raises:
            NotFound: if the file does not exist.
            ConfigurationError: for another suffix, or a syntax error; the message has the line.
        """
        if isinstance(source, Mapping):
            return cls("the configuration", source)
        path = Path(source)
        if path.suffix not in _READERS:
            raise ConfigurationError(f"{path}: a configuration file must end in {', '.join(_READERS)}")
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, IsADirectoryError) as error:
            raise NotFound(f"{path}: no such file") from error
        except ValueError as error:
            raise ConfigurationError(f"{path}: {error}") from error
        try:
            tables = _READERS[path.suffix](text)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path}: {error}") from error
        if not isinstance(tables, dict):
            raise ConfigurationError(f"{path}: contains a {type(tables).__name__}; must be a table with names")
        return cls(str(path), tables)

    def location(self, *path: str | int) -> str:
        """Location of a value, for error messages: in the file, or on the command line."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._set:
                return self._set[path[:length]]
        dotted = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path)
        return f"{self.name}, {dotted.removeprefix('.')}" if path else self.name

    def argument_location(self, argument: str, *path: str | int, called: str = "") -> str:
        """Location of an argument of the table at ``path``: the table, unless the argument was overridden."""
        inside = (*path, argument)
        if inside in self._set:
            return self._set[inside]
        return f"{self.location(*path)} ({called})" if called else self.location(*path)

    def section(self, name: str) -> dict[str, Any]:
        """A table of the document; empty if missing."""
        table = self.tables.get(name, {})
        if not isinstance(table, dict):
            raise ConfigurationError(f"{self.location(name)}: is {table!r}; must be a table, [{name}]")
        return table

    def set(self, assignment: str, sections: Iterable[str]) -> None:
        """Apply ``key=value``: a dotted key, and a TOML value or else a string.

        A callback is named by its class or its ``name``: ``callbacks.JsonLogger.run=baseline``.
        """
        key, equals, text = assignment.partition("=")
        words = key.strip().split(".")
        option = f"--set {assignment}"
        if not equals or not all(words):
            raise ConfigurationError(f"{option}: write it as key=value, such as args.max_steps=100")
        expect_known(f"key in {option}:", words[:1], [*sections])
        path: tuple[str | int, ...] = tuple(words)
        if words[0] == "callbacks":
            path = self._callback_path(words, option)
        table: Any = self.tables
        for word in path[:-1]:
            table = table.setdefault(word, {}) if isinstance(table, dict) else table[word]
            if not isinstance(table, (dict, list)):
                raise ConfigurationError(f"{option}: {word!r} is {table!r}, which has no keys")
        table[path[-1]] = _toml_value(text)
        self._set[path] = option

    def callbacks(self) -> list[dict[str, Any]]:
        """The entries under ``callbacks``, in which ``"Name"`` is short for ``{use = "Name"}``."""
        entries = self.tables.get("callbacks", [])
        if not isinstance(entries, list):
            raise ConfigurationError(f'{self.location("callbacks")}: must be a list, [{{use = "JsonLogger"}}, …]')
        for index, entry in enumerate(entries):
            if isinstance(entry, str):
                entries[index] = {"use": entry}
            elif not isinstance(entry, dict) or not isinstance(entry.get("use"), str):
                raise ConfigurationError(
                    f"{self.location('callbacks', index)}: is {entry!r}; must be "
                    '{use = "…"}, with the name of a callback and its arguments'
                )
        return entries

    def _callback_path(self, words: list[str], option: str) -> tuple[str | int, ...]:
        """The path of ``callbacks.Name.argument``, with the index of the entry; adds an entry if there is none."""
        if len(words) < 3:
            raise ConfigurationError(f"{option}: name the callback and its argument, callbacks.JsonLogger.run=…")
        entries = self.callbacks()
        names = [(entry.get("name"), str(entry["use"]).rpartition(":")[2]) for entry in entries]  # its own, its class's
        found = [index for index, each in enumerate(names) if words[1] in each]
        if len(found) > 1:
            raise ConfigurationError(
                f"{option}: {len(found)} callbacks have that name; set name= on each in the file, and use that here"
            )
        if not found:
            self.tables["callbacks"] = [*entries, {"use": words[1]}]
            found = [len(entries)]
            self._set["callbacks", found[0]] = option
        return ("callbacks", found[0], *words[2:])


def is_configuration(source: object) -> bool:
    """Whether it is the name of a file that :meth:`Document.read` reads."""
    return Path(str(source)).suffix in _READERS


def read_assignments(words: Iterable[str], location: str) -> dict[str, Any]:
    """Arguments ``NAME=VALUE``, each with a TOML value or else a string."""
    arguments = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigurationError(
                f"{location}: takes no arguments, but {word!r} was given; the function's own are NAME=VALUE, such as "
                "output_dir=runs/a"
            )
        arguments[name] = _toml_value(text)
    return arguments


def _toml_value(text: str) -> Any:
    try:
        tables = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return tables["value"] if len(tables) == 1 else text


def _read_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigurationError(
            f"reading YAML needs PyYAML, which is not installed (TOML needs nothing); {how_to_install('yaml')}"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(str(error)) from error


_READERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".json": lambda text: from_json(json.loads(text)),
}


@contextmanager
def error_context(location: str) -> Iterator[None]:
    """Prefix the message of a DalsegnoError raised inside: ``run.toml, callbacks[0] (Beat): …``."""
    try:
        yield
    except DalsegnoError as error:
        error.args = (f"{location}: {error}",)
        raise
