"""The machine and its system: what Windows lacks of POSIX, the kernel's identity, memory and processors.

Logs are read on any system; training needs Linux or macOS.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


# --- the kernel that runs this process ------------------------------------------------------------------------------


def boot_id() -> str | None:
    """Id of this start of the kernel, which the containers of a machine share; None on systems without ``/proc``."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except (OSError, ValueError):
        return None


def pid_namespace() -> str | None:
    """Name of the namespace that this process's pid belongs to; None on systems without ``/proc``.

    A container usually has one of its own. Once all its processes have ended, the kernel may give the name to another.
    """
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


# --- the name of this process in ps and top -------------------------------------------------------------------------


_SHORT_NAME = 15  # bytes of it that the kernel keeps beside the command line

_title = ""
"""What :func:`set_process_title` has set, here or in a process that this one was forked from."""


def set_process_title(title: str) -> None:
    """Show ``title`` in place of this process's command line: its beginning, if it is longer than that.

    It is written over the arguments, which the kernel reads from the process's memory when it is asked for them. Does
    nothing on systems without ``/proc``.
    """
    global _title
    _title = title
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        begin, length = int(fields[45]), int(fields[46]) - int(fields[45])  # 0 and 0 without permission
        if length > 0:
            with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
                memory.seek(begin)
                memory.write(title.encode()[: length - 1].ljust(length, b"\0"))
        Path("/proc/self/comm").write_bytes(title.encode()[:_SHORT_NAME])
    except OSError:
        pass


def extend_process_title(role: str) -> None:
    """In a process forked from one with a title, put ``role`` before it."""
    if _title:
        set_process_title(f"{role}, {_title}")


# --- peak resident memory of this process ---------------------------------------------------------------------------


_STATUS = Path("/proc/self/status")

_read: tuple[int, int, int] | None = None
"""Process, its ``ru_maxrss`` when ``/proc`` was last read, and the peak in bytes that was read there."""


def peak_resident_memory() -> int:
    """Return the highest resident memory of this process so far, in bytes.

    On Linux, ``ru_maxrss`` would not do: a child process begins with the peak of its parent, even after ``exec``. But
    it grows with this process's own peak; ``/proc``, which takes twenty times as long, is read only if it may have.
    """
    global _read
    import resource  # Windows has none, and reads logs with this module

    process, resident = os.getpid(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if _read is not None and _read[:2] == (process, resident) and resident * 1024 <= _read[2]:
        return _read[2]
    for line in _STATUS.read_text().splitlines() if _STATUS.exists() else ():
        if line.startswith("VmHWM:"):
            _read = process, resident, int(line.split()[1]) * 1024  # in KiB, whatever "kB" says
            return _read[2]
    return resident if sys.platform == "darwin" else resident * 1024


# --- available memory and disk space, asked before a save -------------------------------------------------------------


_CGROUPS = Path("/sys/fs/cgroup")
_SHARE = 0.9
"""Share of the available memory that a save may take. Training allocates from the rest meanwhile."""


def has_memory_for(count: int) -> bool:
    """Whether this rank may allocate ``count`` more bytes. True if the available memory is unknown."""
    available = available_memory() if count else None  # nothing is needed once the buffers of a former save are there
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
    import resource

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


# --- threads that move memory: how many of a rank at once, and their priority ----------------------------------------


_MOST_THREADS = 4


def thread_count() -> int:
    """This rank's share of the processors that it may run on; at most 4, which saturate the memory."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, allowed // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def run_on_threads(work: Callable[[int], object], count: int, name: str) -> None:
    """Call ``work`` with 0 on this thread, and with each further number below ``count`` on another one; raises what one
    has raised once all have ended. ``name``: prefix of the threads' names."""
    if count <= 1:
        work(0)
        return
    with ThreadPoolExecutor(count - 1, thread_name_prefix=name) as beside:
        others = [beside.submit(work, number) for number in range(1, count)]
        work(0)
        for other in others:
            other.result()


LOWEST = 39
"""From the highest priority to the lowest, in steps of nice."""


def lower_thread_priority(by: int = LOWEST) -> None:
    """Give the calling thread, and the threads that it starts, a lower priority, in favor of training. ``by``: steps of
    nice, of which the lowest priority is 19; by default it becomes the lowest."""
    if sys.platform == "linux":  # where priorities are per thread, not per process
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + by))
