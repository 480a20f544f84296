"""What there is of memory and disk, before something that needs a lot of it is begun."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_SHARE = 0.9
"""Of the memory that is available: what a save may take. The rest is for what training allocates meanwhile."""


def has_memory_for(count: int) -> bool:
    """Whether each rank of this host may take ``count`` bytes more. Yes, where nothing says how much there is."""
    available = available_memory()
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return available is None or count * ranks_here <= _SHARE * available


def available_memory() -> int | None:
    """Bytes that may be taken without swapping: the host's, or what the tightest control group (v2) leaves."""
    limits = [limit for limit in (_of_host(), *map(_of_group, _groups())) if limit is not None]
    return min(limits, default=None)


def free_disk(directory: Path) -> int:
    """Bytes that an ordinary user may still write into ``directory``."""
    return shutil.disk_usage(directory).free


def human(count: int) -> str:
    """``1.5 GB`` for 1,500,000,000 bytes."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}" if size < 1000 else f"{size:.0f} {units[0]}"


def _of_host() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _groups() -> list[Path]:
    """This process's control group and those around it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return []
    group = _CGROUPS / own
    return [each for each in (group, *group.parents) if each.is_relative_to(_CGROUPS)]


def _of_group(group: Path) -> int | None:
    """What its limit leaves; what it holds of files can be dropped, and counts as free."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        lines = (group / "memory.stat").read_text().splitlines()
        counts = dict(line.split(maxsplit=1) for line in lines)
        files = int(counts["inactive_file"]) + int(counts["active_file"])
        return max(0, int(limit) - used + files)
    except (OSError, ValueError, KeyError):
        return None
