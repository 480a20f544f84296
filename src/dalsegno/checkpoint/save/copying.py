"""The copy of a snapshot's tensors into buffers: training waits for it, and another thread writes what is copied.

Writing begins with the first piece: where copying takes half as long as writing, a save would otherwise take half as
long again. What comes from a GPU is written once all of it has arrived: those copies take far less time than the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from dalsegno.distributed import accelerator

from .copied_bytes import CopiedBytes, not_copied
from .cuda_copies import CudaCopies
from .staging import Buffer


class Copying:
    """Copies to be made once, on the thread that trains."""

    def __init__(self, cuda: CudaCopies, optimizers: Sequence[Optimizer]) -> None:
        """
        Args:
            cuda: makes the copies from GPUs.
            optimizers: alone change their parameters and their state, in ``step()``.
        """
        self._cuda, self._optimizers = cuda, optimizers
        self._files: list[tuple[Buffer, Sequence[torch.Tensor], CopiedBytes]] = []
        self._has_begun_all = threading.Event()
        self._wait_for_cuda: Callable[[], None] | None = None
        self._failure: BaseException | None = None

    def add(self, buffer: Buffer, tensors: Sequence[torch.Tensor]) -> CopiedBytes:
        """Copy ``tensors`` into ``buffer``, which is laid out for them; after what was added before."""
        copied = CopiedBytes(buffer.length, len(buffer.memory))
        self._files.append((buffer, tensors, copied))
        return copied

    def run(self) -> None:
        """Copy; copies from GPUs may still be in progress afterwards. Does nothing the second time."""
        if self._has_begun_all.is_set():
            return
        try:
            self._cuda.begin(self._optimizers)
            for buffer, tensors, copied in self._files:
                buffer.copy(tensors, self._cuda, copied.advance)
            self._wait_for_cuda = self._cuda.end()
        except BaseException as error:
            self.abandon(error)
            raise
        self._finish()

    def abandon(self, error: BaseException) -> None:
        """Let the threads that wait for a copy fail with ``error``. Has no effect when everything is copied."""
        if self._has_begun_all.is_set():
            return
        self._failure = error
        for _, _, copied in self._files:
            copied.fail(error)
        self._finish()

    def wait_for_devices(self) -> None:
        """Wait, on any thread, until all copies from GPUs are complete; returns at once where there is none.

        Raises:
            SaveFailed: if they will not be.
        """
        if accelerator.kind() is not None:
            self._has_begun_all.wait()
            if self._failure is not None:
                raise not_copied(self._failure) from self._failure
            if self._wait_for_cuda is not None:
                self._wait_for_cuda()

    def _finish(self) -> None:
        self._files = []  # the tensors are free
        self._has_begun_all.set()
