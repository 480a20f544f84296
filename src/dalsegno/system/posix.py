"""What Windows lacks of POSIX. Logs are read on any system; training needs Linux or macOS."""

from __future__ import annotations

import os
import platform

try:
    import fcntl as fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

O_DIRECT = getattr(os, "O_DIRECT", 0)
"""Absent on macOS, too."""
O_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
O_BINARY = getattr(os, "O_BINARY", 0)
"""Of Windows only: keeps bytes as they are."""
O_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


def pread(descriptor: int, count: int, offset: int) -> bytes:
    """Read up to ``count`` bytes at ``offset``. On Windows this moves the file's position."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, count, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, count)


def host_name() -> str:
    """Name of this host."""
    return os.uname().nodename if hasattr(os, "uname") else platform.node()


def can_train() -> bool:
    """Whether this system has what training needs: file locks that end with their process, and forks."""
    return fcntl is not None
