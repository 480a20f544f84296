"""Component keys that several modules use."""

from __future__ import annotations

CALLBACKS = "callbacks."
"""Prefix of the keys of callbacks."""

MODEL = "model"
"""Key of the model."""

LOSS = "loss_fn"
"""Key of a loss function with tensors."""

SETTINGS = "settings"
"""Key of the run's settings."""

ADAPTERS = "adapters."
"""Prefix of the settings that have the configurations of a model's adapters: ``adapters.<adapter>.<name>``."""
