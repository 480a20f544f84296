"""Cerebras's dialect: the callbacks of the Model Zoo's trainer."""

from .dialect import Callback, Cerebras, Logger

__all__ = ["DIALECT", "Callback", "Cerebras", "Logger"]

DIALECT = Cerebras
