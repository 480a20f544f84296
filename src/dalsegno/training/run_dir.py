"""The lock of a run's directory: one process group at a time may train in an ``output_dir``."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dalsegno.args import TrainingArguments
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError, Locked
from dalsegno.system.filesystem import make_directory
from dalsegno.system.lock import DirectoryLock, is_visible


@contextmanager
def locked_run_dir(args: TrainingArguments) -> Iterator[None]:
    """Create ``args.directory`` and hold its lock. Collective.

    Raises:
        Locked: if another live process holds it.
        ConfigurationError: if the directory cannot be written to, or is not the same one on all ranks.
    """
    directory = args.directory
    lock = DirectoryLock(directory, take_over=args.take_over_lock)

    def open_directory() -> str:
        make_directory(directory)
        return lock.acquire()

    try:
        token = collectives.from_rank_zero(open_directory)
    except Locked:
        raise
    except OSError as error:
        raise ConfigurationError(f"output_dir={str(directory)!r}: cannot be written to: {error}") from error
    try:
        _check_is_shared(directory, token)
        yield
    finally:
        lock.release()


def check_writable(directory: Path) -> None:
    """Raises ConfigurationError if the directory could not be created or written to: now, not at the first
    checkpoint."""
    existing = next(path for path in [directory, *directory.absolute().parents] if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigurationError(f"output_dir={str(directory)!r}: {existing} is not a folder that can be written to")


def _check_is_shared(directory: Path, token: str) -> None:
    """Raises ConfigurationError on all ranks, if one does not see what rank 0 has written. Else each host would have a
    part of every checkpoint."""
    me = (socket.gethostname(), collectives.rank() == 0 or is_visible(directory, token))
    ranks = collectives.gather(me, "who sees output_dir")
    if blind := [f"rank {rank} on {host}" for rank, (host, sees) in enumerate(ranks) if not sees]:
        more = f" and {len(blind) - 1} more" if blind[1:] else ""
        raise ConfigurationError(
            f"output_dir={str(directory)!r}: what rank 0 on {ranks[0][0]} has written there is not seen by {blind[0]}"
            f"{more}; name the same folder on all ranks, on a disk that all hosts share (for a URL: local_dir=)"
        )
