"""Durability: a failed fsync of a directory is remembered, by the file whose name it was to flush, as long as the
process lives.

The kernel reports it once: another fsync returns, whether the name is on disk or not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dalsegno.errors import DalsegnoError

from . import filesystem


class NotDurable(OSError):
    """An fsync has failed, and with it bytes of a file, or its name, are lost: only a new write helps."""


_failures: dict[str, OSError] = {}  # by path of the file


def expect_durable(path: Path) -> None:
    """Raises NotDurable if an fsync that was to flush the name of ``path`` has failed in this process."""
    failure = _failures.get(os.path.realpath(path))
    if failure is not None:
        raise NotDurable(
            failure.errno,
            f"its name may be lost, and with it what it contains, since an fsync has failed ({failure}); restart the "
            "process",
            str(path),
        )


def flush_name(path: Path) -> None:
    """Fsync the directory of ``path``. Raises NotDurable if the disk refuses it, at this call or at an earlier one."""
    flush_names([path])


def flush_names(paths: Iterable[Path]) -> None:
    """As :func:`flush_name`, for several files: one fsync for each directory."""
    by_directory: dict[Path, list[Path]] = {}
    for path in paths:
        expect_durable(path)
        by_directory.setdefault(path.parent, []).append(path)
    for directory, inside in by_directory.items():
        try:
            filesystem.fsync_directory(directory)
        except DalsegnoError:  # before the fsync
            raise
        except OSError as error:
            raise _remember(error, *inside) from error


def replace_durably(path: Path, data: filesystem.Buffer) -> None:
    """As :func:`.filesystem.replace_durably`. Raises NotDurable if the disk refuses to flush the name, at this call or
    at an earlier one: the content is then the former or the new one. After any other OSError it is unchanged."""

    def inode() -> int | None:
        return path.stat().st_ino if path.exists() else None

    expect_durable(path)
    former = inode()
    try:
        filesystem.replace_durably(path, data)
    except DalsegnoError:
        raise
    except OSError as error:
        if inode() == former:
            raise
        raise _remember(error, path) from error


def _remember(error: OSError, *paths: Path) -> NotDurable:
    _failures.update(dict.fromkeys(map(os.path.realpath, paths), error))
    what = f"its name may be lost: fsync of the directory failed: {error.strerror}"
    return NotDurable(error.errno, what, str(paths[0]))
