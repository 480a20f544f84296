"""Optional dependencies: an error that names the extra to install."""

from __future__ import annotations

from importlib.util import find_spec

from dalsegno.errors import ConfigurationError
from dalsegno.system.extras import how_to_install


def require_extra(module: str, what: str) -> None:
    """
    Args:
        what: the task that needs it, as the subject of a sentence: "plotting".

    Raises:
        ConfigurationError: if ``module`` is not installed.
    """
    if find_spec(module) is None:
        raise ConfigurationError(f"{what} needs {module}, which is not installed; {how_to_install('analysis')}")
