"""A function of the user's own, by its name."""

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
    """``module:function``. It travels to other processes by its name, and they import it for themselves."""

    name: str

    @classmethod
    def named(cls, name: str) -> Factory:
        """
        Raises:
            ConfigurationError: if that is no name, or the module cannot be imported.
            UnknownName: if the module has no such function; the message names the nearest.
        """
        factory = cls(name)
        factory.find()
        return factory

    def find(self) -> Callable[[Path], Any]:
        """The function itself; raises as :meth:`named`."""
        return cast(Callable[[Path], Any], find_named(self.name, "function", "my_training:build"))

    def __call__(self, output_dir: Path) -> Any:
        """Build the trainer, in a leg. What the leg prints goes to a file beside its folder."""
        redirect_output(output_dir.with_suffix(".txt"))
        trainer = self.find()(output_dir)
        if not callable(getattr(trainer, "train", None)):
            raise ConfigurationError(f"{self.name} gave a {type(trainer).__name__}, not a trainer")
        return trainer
