"""Available memory and disk space, asked before a save; ``checkpoint.async_save`` refuses one that has no room."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_SHARE = 0.9
"""Share of the available memory that a save may take. Training allocates from the rest meanwhile."""


def has_memory_for(count: int) -> bool:
    """Whether this rank may allocate ``count`` more bytes. True if the available memory is unknown."""
    available = available_memory()
    return available is None or count <= _SHARE * available


def available_memory() -> int | None:
    """Bytes that this rank may allocate without swapping; None if unknown. An equal share, among the ranks of this
    host, of what the host and its control groups have left; at most what the process's own limit (``ulimit -v``)
    leaves."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    shared = [limit // ranks_here for limit in (_of_host(), *map(_of_group, control_groups())) if limit is not None]
    return min((limit for limit in (_of_process(), *shared) if limit is not None), default=None)


def free_disk(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def _of_host() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _of_process() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return None
    return None if limit == resource.RLIM_INFINITY else max(0, limit - pages * resource.getpagesize())


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
"""Of each version of control groups: files of the limit and of what is used; entries of ``memory.stat`` for the page
cache."""


def control_groups() -> Iterator[Path]:
    """This process's control groups, of both versions, and their parents."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            root = _CGROUPS if number == "0" else _CGROUPS / "memory"
            group = root / path.lstrip("/")
            yield from (each for each in (group, *group.parents) if each.is_relative_to(root))


def _of_group(group: Path) -> int | None:
    """Bytes that the group's limit leaves. Its page cache can be dropped, and counts as free."""
    limit_file, used_file, droppable = _V2 if (group / _V2[0]).exists() else _V1
    try:
        limit = (group / limit_file).read_text().strip()
        if limit == "max":
            return None
        used = int((group / used_file).read_text())
        counts = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + sum(int(counts[name]) for name in droppable))
    except (OSError, ValueError, KeyError):
        return None
