"""A simulated accelerator, ``sim``: two devices, which do their work as late as streams and events allow.

It is a C++ library (``device.cpp``): torch's way to write a device in Python has one device, and neither streams nor
events nor generators. :func:`build` compiles it once; :func:`plug_in` makes it this process's accelerator for good, so
it is called in a process of its own. Operations are the CPU's. Collectives wait for the device and go through the host.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SOURCE = Path(__file__).with_name("device.cpp")
KIND = "sim"


def compiler() -> str | None:
    return next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def build() -> Path:
    """The library, compiled unless that has been done: half a minute."""
    own = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(__file__).parents[2] / "build" / "simulated" / f"{own}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "lock").open("w") as lock:  # other tests wait for the one that compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            home = Path(torch.__file__).parent
            found = compiler()
            assert found is not None
            fresh = library.with_suffix(".fresh")
            includes = ["-isystem", home / "include", "-isystem", home / "include/torch/csrc/api/include"]
            links = ["-L", home / "lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home / 'lib'}"]
            command = [found, "-std=c++20", "-O1", "-shared", "-fPIC", *includes, SOURCE, "-o", fresh, *links]
            subprocess.run(command, check=True)
            fresh.replace(library)
    return library


def plug_in(order: int = 0, patience: int = 0) -> None:
    """Make the simulated devices this process's accelerator.

    Args:
        order: what streams do that nobody waits for comes later than what is waited for (0), before it (1), or partly
            before it, by this seed.
        patience: operations that the training thread may still launch while another thread waits, for up to half a
            second.
    """
    if not hasattr(torch, KIND):
        torch.ops.load_library(build())
        torch.utils.rename_privateuse1_backend(KIND)
        torch.utils.generate_methods_for_privateuse1_backend()
    torch.ops.simulated.begin(order, patience)
    if not hasattr(torch, KIND):
        torch._register_device_module(KIND, _module())
        dist.Backend.register_backend("simulated", dist.ProcessGroupGloo, devices=[KIND])


def _module() -> Any:
    """What torch expects of a module such as ``torch.cuda``."""
    generators = [torch.ops.simulated.generator(number) for number in range(2)]

    def index(device: Any) -> int:
        if isinstance(device, int):
            return device
        found = None if device is None else torch.device(device).index
        return torch.accelerator.current_device_index() if found is None else found

    def set_rng_state_all(states: Sequence[Tensor]) -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    return SimpleNamespace(
        Stream=torch.Stream,
        Event=torch.Event,
        default_generators=generators,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 2,
        current_device=torch.accelerator.current_device_index,
        set_device=torch.accelerator.set_device_index,
        stream=lambda stream: stream,
        current_stream=torch.accelerator.current_stream,
        synchronize=torch.accelerator.synchronize,
        get_device_name=lambda device=None: "Simulated",
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        get_rng_state=lambda device=None: generators[index(device)].get_state(),
        set_rng_state=lambda state, device=None: generators[index(device)].set_state(state),
        get_rng_state_all=lambda: [each.get_state() for each in generators],
        set_rng_state_all=set_rng_state_all,
        manual_seed=lambda seed: generators[index(None)].manual_seed(seed),
        manual_seed_all=manual_seed_all,
        memory_stats=torch.accelerator.memory_stats,
        memory_allocated=torch.accelerator.memory_allocated,
        max_memory_allocated=torch.accelerator.max_memory_allocated,
        reset_peak_memory_stats=torch.accelerator.reset_peak_memory_stats,
    )


def waits(own: bool = False) -> int:
    """How often the host has waited for the devices; ``own``: the thread that trains."""
    return int(torch.ops.simulated.waits(own))


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Raise where the host waits for a device."""
    torch.ops.simulated.forbid_waits(True)
    try:
        yield
    finally:
        torch.ops.simulated.forbid_waits(False)
