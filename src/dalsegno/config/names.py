"""Names of code, ``module:name``. A lookup imports the module: the only code that a configuration can cause to run."""

from __future__ import annotations

import importlib
import traceback
from typing import Any

from dalsegno.errors import ConfigurationError, UnknownName


def find_named(text: str, what: str, example: str) -> Any:
    """The callable ``module:name`` at the top level of a module.

    Args:
        what: kind of object, for error messages.
        example: valid ``text``, for error messages.

    Raises:
        ConfigurationError: if ``text`` is not ``module:name``, or the module cannot be imported.
        UnknownName: if the module has no callable of that name; suggests the nearest.
    """
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise ConfigurationError(f"{text!r}: name the {what} as module:name, such as {example}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"no module {error.name!r}, neither in the current directory nor installed"
            ) from error
        raise ConfigurationError(f"{module_name}: cannot be imported\n{traceback.format_exc()}") from error
    found = {key: value for key, value in vars(module).items() if callable(value)}
    if name not in found:
        raise UnknownName(f"{what} of {module_name}", name, found)
    return found[name]
