"""Random generators of an accelerator other than CUDA: Apple's (mps), Intel's (xpu), or one that a library registers.

A Trainer does not use such a device yet; a loop of the user's own may.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypedDict, final

import torch


@final
class AcceleratorStates(TypedDict):
    """States of the generators of all devices."""

    type: str
    """Of the devices."""
    states: list[torch.Tensor]


def capture_accelerator() -> AcceleratorStates | None:
    """Return the states of the generators; None without such a device."""
    if (found := _accelerator()) is None:
        return None
    kind, module = found
    has_several = hasattr(module, "get_rng_state_all")  # mps has one device
    return {"type": kind, "states": module.get_rng_state_all() if has_several else [module.get_rng_state()]}


def restore_accelerator(saved: AcceleratorStates | None) -> bool:
    """Restore the generators. Returns False if ``saved`` is of other devices, which leaves them as they are."""
    found, here = _accelerator(), capture_accelerator()
    if found is None or here is None:
        return True
    if saved is None or (saved["type"], len(saved["states"])) != (here["type"], len(here["states"])):
        return False
    _, module = found
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(saved["states"])
    else:
        module.set_rng_state(saved["states"][0])
    return True


def seed_accelerator(seed: int) -> None:
    """Seed the generators of all devices."""
    if (found := _accelerator()) is not None:
        _, module = found
        (module.manual_seed_all if hasattr(module, "manual_seed_all") else module.manual_seed)(seed)


@contextmanager
def seeded_accelerator(seed: int) -> Iterator[None]:
    """Seed the generators; restore them on exit."""
    before = capture_accelerator()
    seed_accelerator(seed)
    try:
        yield
    finally:
        restore_accelerator(before)


def _accelerator() -> tuple[str, Any] | None:
    """Type of the devices, and torch's module for them."""
    if torch.cuda.is_available() or not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else (device.type, torch.get_device_module(device))
