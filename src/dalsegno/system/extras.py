"""How to get what only some people need: the optional dependencies of pyproject.toml."""

from __future__ import annotations

import importlib.util

from dalsegno.errors import ConfigurationError


def how_to_install(extra: str) -> str:
    """The commands that install ``extra``, for the end of a message."""
    return f"in a clone of dalsegno, pip install -e '.[{extra}]'; from an index, pip install 'dalsegno[{extra}]'"


def require_extra(extra: str, module: str, what: str) -> None:
    """

    Raises ConfigurationError if ``module`` is not installed.

    Args:
        extra: that includes the module.
        module: a module of the library.
        what: the task that needs it, as the subject of a sentence: "plotting".
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigurationError(f"{what} needs {module}, which is not installed; {how_to_install(extra)}")
