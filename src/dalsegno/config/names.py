"""Names of code, ``module:name``. Looking one up imports the module: more a configuration cannot make happen."""

from __future__ import annotations

import importlib
import traceback
from typing import Any

from dalsegno.errors import ConfigurationError, UnknownName


def find_named(text: str, what: str, example: str) -> Any:
    """The thing at the top of a module that ``text`` names, ``module:name``; ``what`` it is, for messages.

    Raises:
        ConfigurationError: if ``text`` is no such name, or the module cannot be imported.
        UnknownName: if the module has nothing callable of that name; the message names the nearest.
    """
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise ConfigurationError(f"{text!r}: name the {what} as module:name, such as {example}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigurationError(f"no module {error.name!r}, neither here nor installed") from error
        raise ConfigurationError(f"{module_name}: cannot be imported\n{traceback.format_exc()}") from error
    found = {key: value for key, value in vars(module).items() if callable(value)}
    if name not in found:
        raise UnknownName(f"{what} of {module_name}", name, found)
    return found[name]
