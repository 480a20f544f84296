"""Python programs as processes of their own, started in a tenth of a second.

They are forked from the process that ranks are forked from (``run_ranks``), which has imported torch, its compiler and
the trainer. Started from nothing, a program that imports torch takes 2 CPU seconds, and the process that it forks its
ranks from 4 more. Everything else is as in a process that was executed: pid, signals, exit status, streams, directory,
environment, ``sys.argv``, ``sys.path`` and ``__main__``. That a program imports what it needs is shown only by one that
starts from nothing (``cli.command.cold``).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import get_context, reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any, Self, cast

from dalsegno.distributed.forked import settle_after_fork
from dalsegno.testing.processes import PRELOADED
from support import fork_server

Words = Sequence[str | Path]
"""A script and its arguments."""


class Program:
    """One that runs; as ``subprocess.Popen``, for which it stands. What it writes to pipes is UTF-8."""

    def __init__(
        self,
        words: Words,
        *,
        folder: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        start_new_session: bool = False,
    ) -> None:
        """``stdout``, ``stderr``: a file, ``subprocess.PIPE``, or None for those of the tests."""
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        read: list[IO[str] | None] = []
        theirs: list[int] = []
        for stream, number in ((stdout, 1), (stderr, 2)):
            if stream == subprocess.PIPE:
                ours, written = os.pipe()
                read.append(os.fdopen(ours, encoding="utf-8"))
            else:
                written = os.dup(number if stream is None else cast(IO[Any], stream).fileno())
                read.append(None)
            theirs.append(written)
        self.stdout, self.stderr = read
        environment = dict(os.environ if env is None else env)
        path = _usual_path(environment.get("PYTHONPATH"))
        start = (tuple(map(str, words)), str(folder or Path.cwd()), environment, path, start_new_session)
        self._process: BaseProcess = context.Process(target=_run, args=(*start, *map(_Stream, theirs)))
        self._process.start()
        for written in theirs:
            os.close(written)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        self._process.join()
        assert self.returncode is not None
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """What it still writes to its two pipes, before its end."""
        assert self.stdout is not None and self.stderr is not None
        written = self.stdout.read(), self.stderr.read()
        self.wait()
        return written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(words: Words, *, folder: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run it in ``folder``, to its end."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        status = Program(words, folder=folder, env=env, stdout=out, stderr=err).wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([str(word) for word in words], status, *texts)


@cache
def _usual_path(added: str | None) -> list[str]:
    """``sys.path`` of a Python that pytest has not extended, without the script's folder; ``added``: its PYTHONPATH."""
    environment = {**os.environ, "PYTHONPATH": added or ""}
    command = [sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')"]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True).stdout.splitlines()[1:]


class _Stream:
    """A file descriptor that travels to the new process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken, (reduction.DupFd(self._number),)


def _taken(number: Any) -> int:
    return cast(int, number.detach())


def _run(
    words: tuple[str, ...],
    folder: str,
    environment: Mapping[str, str],
    path: Sequence[str],
    new_session: bool,
    out: int,
    err: int,
) -> None:
    settle_after_fork(environment, threads=None)
    tempfile.tempdir = None  # TMPDIR may be another
    sys.modules.pop("dalsegno.launcher.template", None)  # a test's own launch may have started the server,
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # which then ignores these
    if new_session:
        os.setsid()
    os.chdir(folder)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    script = str(Path(folder, words[0]))
    sys.argv, sys.orig_argv = list(words), [sys.executable, *words]
    sys.path[:] = [str(Path(script).parent), *path]
    fork_server.fork_from_here()
    try:
        _run_as_main(script)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _run_as_main(script: str) -> None:
    """As Python itself does. ``runpy`` would stay on the stack, in frames of no module.

    ``inspect.stack()`` looks for these in all modules, and torch's rendezvous calls it for each message.
    """
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)
