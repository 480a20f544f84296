"""multiprocessing's fork server, forked from this process instead of executed: it has all that this one has imported.

Executed, it imports torch, the trainer and what the tests import again, which takes 9 CPU seconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from multiprocessing import forkserver, util
from typing import Any, cast


def fork_from_here() -> None:
    """Fork the server of this process, which has one thread of Python now.

    It waits until it is needed, or this process ends.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        try:
            _serve(theirs)
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(0)
    theirs.close()
    execute = util.spawnv_passfds  # type: ignore[attr-defined]

    def spawnv_passfds(path: str, words: Sequence[str], kept: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in words[-1]:
            return cast(int, execute(path, words, kept))
        order = json.dumps([[os.fsdecode(word) for word in words], kept]).encode()
        socket.send_fds(ours, [order], [0, 1, 2, *kept])
        ours.close()
        util.spawnv_passfds = execute  # type: ignore[attr-defined]
        return pid

    util.spawnv_passfds = spawnv_passfds  # type: ignore[attr-defined]


def _serve(orders: socket.socket) -> None:
    """Be the fork server, once its command line, its streams and its files are known.

    The files that this process has inherited stay open: handlers of loggers may write to them.
    """
    order, files, *_ = socket.recv_fds(orders, 1 << 16, 8)
    if not order:
        return
    words, kept = json.loads(order)
    for number in (0, 1, 2):
        os.dup2(files[number], number)
        os.close(files[number])
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    sys.argv, sys.orig_argv = ["-c"], words
    called = "main(" + ", ".join(map(str, kept))
    assert called in words[-1], words[-1]
    code = words[-1].replace(called, "main(" + ", ".join(map(str, files[3:])))
    exec(compile(code, __file__, "exec"), {})  # a frame of no file would be looked for in all modules
