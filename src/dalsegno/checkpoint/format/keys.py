"""The keys of components that more than one part of the code asks for by name."""

from __future__ import annotations

CALLBACKS = "callbacks."
"""What the keys of callbacks begin with."""

MODEL = "model"
"""The key of the model."""

LOSS = "loss_fn"
"""The key of a loss function that has tensors of its own."""

SETTINGS = "settings"
"""The key of what a run was trained with."""
