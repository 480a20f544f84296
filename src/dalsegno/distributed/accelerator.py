"""The accelerator: everything that is asked of torch about devices other than the CPU.

The kind of device has torch's name: ``cuda`` (and ROCm), ``mps`` (a Mac), ``xpu``, ``npu``, or one that a library
registers. What only some kinds have is looked up on torch's module for the kind. No other module calls ``torch.cuda``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, final

import torch
import torch.distributed as dist

logger = logging.getLogger("dalsegno")

CPU = torch.device("cpu")

_WITHOUT_FLOAT64 = ("mps",)
_WITHOUT_PINNED_MEMORY = ("mps",)  # its memory is the host's


def kind() -> str | None:
    """Type of this machine's accelerator; None without one."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def device_count() -> int:
    """Number of devices. Does not initialize them: a process may still be forked."""
    here = kind()
    return 0 if here is None else int(torch.get_device_module(here).device_count())


def current_device() -> torch.device:
    """This rank's device, as :func:`use_device` has set it; the CPU without an accelerator."""
    here = kind()
    return CPU if here is None else torch.device(here, torch.accelerator.current_device_index())


def use_device(local_rank: int) -> torch.device:
    """Make the device of that number the current one, if there are several; return the current one."""
    if device_count() > 1:
        torch.accelerator.set_device_index(local_rank)
    return current_device()


def group_backend(device: torch.device) -> str | None:
    """Backend of a process group of ranks on ``device``: ``cpu:gloo,cuda:nccl``. CPU tensors (of checkpoints and flags)
    use gloo on any. None if torch has no collectives for it."""
    if device.type == "cpu":
        return "gloo"
    backend = dist.get_default_backend_for_device(device.type)
    return None if backend == "gloo" else f"cpu:gloo,{device.type}:{backend}"


def has_own_backend(backend: str) -> bool:
    """Whether a group of that ``backend`` has collectives for tensors on this machine's accelerator only."""
    if not backend or "gloo" in backend or (here := kind()) is None:
        return False
    return dist.get_default_backend_for_device(here) in backend


def _ask(function: str, device: torch.device) -> Any:
    """What a function of torch's module for devices of that type returns; None where that has no such function."""
    found = getattr(torch.get_device_module(device), function, None)
    return None if found is None else found(device)


def name_of(device: torch.device) -> str:
    """Name of the product, such as ``NVIDIA H100 80GB HBM3``, if torch knows it; else the type."""
    return str(_ask("get_device_name", device) or device.type)


def recorded_events(tensors: Iterable[torch.Tensor]) -> list[torch.Event]:
    """An event on the current stream of each device of ``tensors``: the work that it has so far."""
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    events = {torch.accelerator.current_stream(device): torch.Event(device) for device in devices}
    for stream, event in events.items():
        event.record(stream)  # without it: the stream of the process's current device
    return [*events.values()]


def has_timed_events(device: torch.device) -> bool:
    """Whether :func:`timed_event` works for ``device``."""
    return hasattr(torch.get_device_module(device), "Event")


def timed_event(device: torch.device) -> Any:
    """Record an event on the current stream; ``elapsed_time`` of two is in milliseconds."""
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


memory_allocated: Callable[[torch.device], int | None] = partial(_ask, "memory_allocated")
"""Bytes of tensors on a device; None if torch does not count them."""
max_memory_allocated: Callable[[torch.device], int | None] = partial(_ask, "max_memory_allocated")
"""Most bytes of tensors on a device so far; None if torch does not count them."""
memory_stats: Callable[[torch.device], dict[str, int] | None] = partial(_ask, "memory_stats")
"""Counters of torch's allocator, named as in ``torch.cuda.memory_stats``; None if it has none."""
memory_summary: Callable[[torch.device], str | None] = partial(_ask, "memory_summary")
"""Table of these counters; None if it has none."""


def is_nvidia(device: torch.device) -> bool:
    """Whether NVIDIA's driver knows ``device``."""
    return device.type == "cuda" and torch.version.hip is None


def utilization(device: torch.device) -> float:
    """Percent of the newest sample period, up to a second, in which an NVIDIA GPU was busy."""
    return float(torch.cuda.utilization(device))


def power(device: torch.device) -> float:
    """Watts that an NVIDIA GPU draws."""
    return torch.cuda.power_draw(device) / 1000


def temperature(device: torch.device) -> float:
    """Degrees Celsius of an NVIDIA GPU."""
    return float(torch.cuda.temperature(device))


def can_record_allocations(device: torch.device) -> bool:
    """Whether torch can record the allocations on ``device``: only on CUDA."""
    return device.type == "cuda"


def record_allocations(entries: int | None) -> None:
    """Keep the newest ``entries`` allocations and their stacks; None: stop."""
    torch.cuda.memory._record_memory_history(**({"enabled": None} if entries is None else {"max_entries": entries}))


def dump_allocations(path: Path) -> None:
    """Write the recorded allocations to ``path``, for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def is_initialized() -> bool:
    """Whether this process has used a device, which a forked one could not use again."""
    found = _accelerator()
    return found is not None and bool(getattr(found[1], "is_initialized", bool)())


def can_pin() -> bool:
    """Whether copies to the device are faster from page-locked memory."""
    here = kind()
    return here is not None and here not in _WITHOUT_PINNED_MEMORY


def pin(memory: torch.Tensor) -> Callable[[], object]:
    """Page-lock host memory, so that copies into it do not wait. Only CUDA has a way to do so in place. Returns what
    unlocks it, to be called before the memory is freed."""
    if kind() != "cuda" or not len(memory):
        return lambda: None
    address = memory.data_ptr()
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(cudart.cudaHostRegister(address, len(memory), 1))  # 1: portable, good for every device
    if status != 0:
        logger.debug("cudaHostRegister returned %d; training waits for copies from the GPU into this memory", status)
        return lambda: None
    return partial(cudart.cudaHostUnregister, address)


class LateNumbers:
    """Numbers that are copied from a device while it works on: at most one wait, and only if asked for. ``numbers``:
    0-dim tensors, on the host or on one device, or floats."""

    def __init__(self, numbers: Sequence[torch.Tensor | float]) -> None:
        self._numbers = list(numbers)
        self._places: list[int] = []
        self._copy: torch.Tensor | None = None
        self._event: torch.Event | None = None
        on_device = [
            (place, each)
            for place, each in enumerate(numbers)
            if isinstance(each, torch.Tensor) and each.device.type != "cpu"
        ]
        if on_device:
            self._places = [place for place, _ in on_device]
            together = torch.stack([wide(each.detach().reshape(())) for _, each in on_device])
            self._copy = torch.empty(together.shape, dtype=together.dtype, pin_memory=can_pin())
            self._copy.copy_(together, non_blocking=True)
            (self._event,) = recorded_events([together])

    def are_here(self) -> bool:
        """Whether :meth:`values` would not wait."""
        return self._event is None or bool(self._event.query())

    def values(self) -> list[float]:
        """The numbers as floats; waits for the device if need be."""
        values = dict(enumerate(self._numbers))
        if self._event is not None and self._copy is not None:
            self._event.synchronize()
            values |= dict(zip(self._places, self._copy.tolist(), strict=True))
        return [float(values[place]) for place in range(len(self._numbers))]


def wide_dtype(device: torch.device) -> torch.dtype:
    """Dtype for sums that need many digits: float64, or float32 where the device has no wider one."""
    return torch.float32 if device.type in _WITHOUT_FLOAT64 else torch.float64


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in :func:`wide_dtype` of its device."""
    return tensor.to(wide_dtype(tensor.device))


# --- random generators --------------------------------------------------------------------------------------------


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
def seeded_accelerator(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators; restore them on exit. Of several devices only that of ``device``, if it is one of them."""
    if (found := _accelerator()) is not None and hasattr(found[1], "get_rng_state_all"):
        kind, module = found
        own = [device] if device.type == kind else []
        with torch.random.fork_rng(own, device_type=kind):
            for each in own:
                index = module.current_device() if each.index is None else each.index
                module.default_generators[index].manual_seed(seed)
            yield
        return
    before = capture_accelerator()
    seed_accelerator(seed)
    try:
        yield
    finally:
        restore_accelerator(before)


def check_states(type: str, states: list[torch.Tensor]) -> None:
    """Raise what torch raises for a state that no generator of devices of that type can have, if there are any here."""
    if (found := _accelerator()) is not None and found[0] == type:
        for state in states:
            torch.Generator(type).set_state(state)


def default_generators() -> Sequence[torch.Generator]:
    """The generators that the devices' random operations use, where torch lists them."""
    return () if (found := _accelerator()) is None else tuple(getattr(found[1], "default_generators", ()))


def generator_state() -> torch.Tensor | None:
    """State of the current device's generator, without waiting for the device; None without one, or before its first
    use by this process."""
    generators = default_generators() if is_initialized() else ()
    return generators[current_device().index].get_state() if generators else None


def _accelerator() -> tuple[str, Any] | None:
    """Type of the devices, and torch's module for them."""
    here = kind()
    return None if here is None else (here, torch.get_device_module(here))
