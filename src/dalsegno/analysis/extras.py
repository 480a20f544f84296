"""What only some people need is installed on demand; who lacks it is told how."""

from __future__ import annotations

from importlib.util import find_spec

from dalsegno.errors import ConfigurationError
from dalsegno.system.extras import how_to_install


def require_extra(module: str, what: str) -> None:
    """
    Args:
        what: is to be done with it, as the begin of a sentence: "plots are drawn".

    Raises:
        ConfigurationError: if it is not installed.
    """
    if find_spec(module) is None:
        raise ConfigurationError(f"{what} with {module}, which is not installed; {how_to_install('analysis')}")
