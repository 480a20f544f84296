"""A function of the user's own, by its name."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dalsegno.errors import ConfigurationError, UnknownName

from .console import redirect_output


@dataclass(frozen=True, slots=True)
class Factory:
    """``module:function``. It travels to other processes by its name, and they import it for themselves."""

    module: str
    function: str

    @classmethod
    def named(cls, name: str) -> Factory:
        """
        Raises:
            ConfigurationError: if that is no name, or the module cannot be imported.
            UnknownName: if the module has no such function; the message names the nearest.
        """
        module, colon, function = name.partition(":")
        if not (module and colon and function):
            raise ConfigurationError(f"{name!r}: name the factory as module:function, such as my_training:build")
        factory = cls(module, function)
        factory.find()
        return factory

    def find(self) -> Callable[[Path], Any]:
        """The function itself; raises as :meth:`named`."""
        try:
            module = importlib.import_module(self.module)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name and f"{self.module}.".startswith(f"{error.name}."):
                raise ConfigurationError(f"no module {error.name!r}, neither here nor installed") from error
            raise ConfigurationError(f"{self.module}: cannot be imported\n{traceback.format_exc()}") from error
        functions = {name: value for name, value in vars(module).items() if callable(value)}
        if self.function not in functions:
            raise UnknownName(f"function of {self.module}", self.function, functions)
        return cast(Callable[[Path], Any], functions[self.function])

    def __call__(self, output_dir: Path) -> Any:
        """Build the trainer, in a leg. What the leg prints goes to a file beside its folder."""
        redirect_output(output_dir.with_suffix(".txt"))
        trainer = self.find()(output_dir)
        if not callable(getattr(trainer, "train", None)):
            raise ConfigurationError(f"{self.module}:{self.function} gave a {type(trainer).__name__}, not a trainer")
        return trainer
