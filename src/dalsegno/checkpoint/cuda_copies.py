"""Copies from CUDA memory to the host that overlap with training.

Parameters and optimizer state are copied on a stream of their own, beside the next forward and backward; only the
optimizer changes them, so its next step waits for the copies, on the device. Buffers, which a forward may change, are
copied on the current stream, before later work. The thread that writes the file waits for both.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

logger = logging.getLogger("dalsegno")


class CudaCopies:
    """Starts copies from devices to host memory. One per snapshotter."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._optimized: set[int] = set()
        self._pending: dict[torch.device, list[torch.cuda.Event]] = {}
        self._hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def begin(self, optimizers: Iterable[Optimizer]) -> None:
        """Begin a capture. Only ``step()`` of ``optimizers`` changes their parameters and state."""
        if not torch.cuda.is_available():
            return
        self._optimized.clear()
        for optimizer in optimizers:
            if hasattr(optimizer, "register_step_pre_hook"):
                self._optimized.update(_memory_of(each) for each in _tensors_of(optimizer))
                if optimizer not in self._hooked:
                    self._hooked.add(optimizer)
                    optimizer.register_step_pre_hook(self._before_step)
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, place: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy ``tensor`` to ``place``; complete once the function that :meth:`end` returns has returned."""
        if tensor.device.type != "cuda":
            place.copy_(tensor)
        elif _memory_of(tensor) in self._optimized:
            stream = self._stream(tensor.device)
            with torch.cuda.stream(stream):
                place.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)  # its memory must not be reused before
        else:
            self._stream(tensor.device)
            place.copy_(tensor, non_blocking=True)

    def end(self) -> Callable[[], None]:
        """End the capture. Returns a function that waits, on any thread, until all copies are complete."""
        self._pending = {
            device: [torch.cuda.current_stream(device).record_event(), stream.record_event()]
            for device, stream in self._streams.items()
        }
        events = [event for both in self._pending.values() for event in both]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Never removed: a hook that removes itself breaks the iteration over the hooks.
        for device, events in self._pending.items():
            for event in events:
                torch.cuda.current_stream(device).wait_event(event)
        self._pending = {}


def pin(memory: torch.Tensor) -> Callable[[], object]:
    """Page-lock host memory if CUDA is available, so that copies into it are asynchronous.

    Returns:
        A function that unlocks it. Call it before the memory is freed.
    """
    if not torch.cuda.is_available() or not len(memory):
        return lambda: None
    address = memory.data_ptr()
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(cudart.cudaHostRegister(address, len(memory), 1))  # 1: portable, good for every device
    if status != 0:
        logger.debug("cudaHostRegister returned %d; training waits for copies from the GPU into this memory", status)
        return lambda: None
    return partial(cudart.cudaHostUnregister, address)


def _tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _memory_of(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()
