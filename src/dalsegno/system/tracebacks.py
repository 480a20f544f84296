"""Short tracebacks: an error of dalsegno's ends at the user's call, not a dozen frames inside the library."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from dalsegno.errors import DalsegnoError

P = ParamSpec("P")
T = TypeVar("T")

SWITCH = "DALSEGNO_FULL_TRACEBACK"
"""Environment variable; if it is set to anything but 0, every frame is shown."""

_LIBRARY = f"{Path(__file__).parents[1]}{os.sep}"


def short_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function: drop the frames below it from a :class:`DalsegnoError` that passes through.

    The frames stay if one of them is not dalsegno's own, such as a user's callback or dataset: they show where the
    error comes from. Other exceptions, and causes (``from error``), are left alone.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except DalsegnoError as error:
            if os.environ.get(SWITCH, "0") == "0" and _is_internal(error.__traceback__):
                error.__traceback__ = None
            raise error  # to see all frames: DALSEGNO_FULL_TRACEBACK=1

    return call


def _is_internal(trace: TracebackType | None) -> bool:
    """Whether all frames are of dalsegno, or of the context managers of the standard library that it uses."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not (file.startswith((_LIBRARY, "<string>")) or file == contextlib.__file__):
            return False
        trace = trace.tb_next
    return True
