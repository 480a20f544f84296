"""Restrictions of the process that reads pickles: memory, files, processes, network. They cannot be lifted again.

==================  ==============================  ================================================================
what                where                           by
==================  ==============================  ================================================================
memory              Linux                           RLIMIT_AS: what the process has, and the given number of bytes
open files          everywhere                      RLIMIT_NOFILE
no sockets          Linux on x86-64 and ARM 64      seccomp: the kernel refuses the system call
no new programs     Linux on x86-64 and ARM 64      seccomp
the last two, and   everywhere                      an audit hook of Python, which code in C can evade
no file written
outside a folder
==================  ==============================  ================================================================
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OPEN_FILES = 64

_REFUSED_EVENTS = (
    "ctypes.",
    "ftplib.",
    "http.",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.posix_spawn",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.spawn",
    "os.startfile",
    "os.system",
    "pty.",
    "shutil.",
    "smtplib.",
    "socket.",
    "subprocess.",
    "urllib.",
)
"""Beginnings of the names of Python's audit events."""

# linux/audit.h and asm/unistd.h: by machine, its architecture and socket, execve, execveat, fork, vfork, ptrace,
# io_uring_setup. -1: the machine has no such call.
_CALLS = {
    "x86_64": (0xC000003E, (41, 59, 322, 57, 58, 101, 425)),
    "aarch64": (0xC00000B7, (198, 221, 281, 117, 425)),
}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # _REFUSE: the call fails with EPERM


def enter(folder: Path, memory: int) -> None:
    """Restrict this process from here on.

    Args:
        folder: the only directory in which it may write files.
        memory: bytes that it may allocate beyond those that it has.
    """
    _limit_memory(memory)
    _limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    _limit(resource.RLIMIT_CORE, 0)
    _refuse_system_calls()
    sys.addaudithook(_hook(os.path.realpath(folder)))


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _limit_memory(more: int) -> None:
    pages = Path("/proc/self/statm")
    if pages.exists():
        _limit(resource.RLIMIT_AS, int(pages.read_text().split()[0]) * resource.getpagesize() + more)


def _refuse_system_calls() -> None:
    """Install a seccomp filter. Does nothing on other systems; the audit hook remains."""
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        return
    architecture, calls = _CALLS[platform.machine()]
    program = [(_LOAD, 0, 0, 4), (_JUMP_IF_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    program += [(_JUMP_IF_EQUAL, len(calls) - number, 0, call) for number, call in enumerate(calls)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    prctl(_PR_SET_SECCOMP, _FILTER, ctypes.c_char_p(header), 0, 0)


def _hook(folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_REFUSED_EVENTS) or (event == "open" and _writes_elsewhere(arguments)):
            raise PermissionError(f"{event} is refused while a pickle is read")

    def _writes_elsewhere(arguments: tuple[Any, ...]) -> bool:
        path, _, flags = arguments
        if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return False
        if isinstance(path, int):
            return False
        return os.path.commonpath([folder, os.path.realpath(os.fsdecode(path))]) != folder

    return audit
