"""Checksums of bytes in memory, on a thread of the lowest priority: training needs the processor more."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

from dalsegno.system.worker import lower_thread_priority


@contextlib.contextmanager
def checksum_beside(blocks: Iterable[memoryview]) -> Iterator[Future[str]]:
    """The hexadecimal xxh3-128 of ``blocks``, which is being computed.

    Wait for the result within the context. When that is left because of an exception, the computation ends after the
    current block.
    """
    is_abandoned = threading.Event()

    def compute() -> str:
        checksum = xxhash.xxh3_128()
        for block in blocks:
            if is_abandoned.is_set():
                break
            checksum.update(block)
        return checksum.hexdigest()

    with ThreadPoolExecutor(1, thread_name_prefix="dalsegno-hash", initializer=lower_thread_priority) as beside:
        try:
            yield beside.submit(compute)
        finally:
            is_abandoned.set()
