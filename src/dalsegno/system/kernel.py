"""The kernel that runs this process: which start of it, and which of its pid namespaces."""

from __future__ import annotations

from pathlib import Path


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
