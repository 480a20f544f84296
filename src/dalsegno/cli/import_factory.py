"""The user's function that builds a trainer, imported by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dalsegno.config import find_named
from dalsegno.errors import ConfigurationError

from .console import redirect_output


@dataclass(frozen=True, slots=True)
class Factory:
    """``module:function``. Pickled by name: each process imports the function itself."""

    name: str

    @classmethod
    def named(cls, name: str) -> Factory:
        """
        Raises:
            ConfigurationError: if ``name`` is not ``module:function``, or the module cannot be imported.
            UnknownName: if the module has no such function; suggests the nearest.
        """
        factory = cls(name)
        factory.find()
        return factory

    def find(self) -> Callable[[Path], Any]:
        """Import the function; raises as :meth:`named`."""
        return cast(Callable[[Path], Any], find_named(self.name, "function", "my_training:build"))

    def __call__(self, output_dir: Path) -> Any:
        """Build the trainer in the process of a leg, whose output goes to a file beside ``output_dir``."""
        redirect_output(output_dir.with_suffix(".txt"))
        trainer = self.find()(output_dir)
        if not callable(getattr(trainer, "train", None)):
            raise ConfigurationError(f"{self.name} returned a {type(trainer).__name__}, not a trainer")
        return trainer
