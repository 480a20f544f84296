"""Directories of memory checkpoints: files in shared memory, which outlive a process but not its host. Needs no torch.

::

    /dev/shm/dalsegno-1000/             of this user only (mode 0700)
      9f86d081884c7d65/                 of one leg of a run, on each of its hosts; run.json records the name
        owner.json                      output_dir of the run, its device and inode, and the boot of the host
        checkpoints/
          step-00000490/                a published checkpoint
          slot-3b0a-0/  slot-3b0a-1/    hidden: being written, or kept to be written again

A file of frozen parameters that have not changed is one file, with a name in both. With several hosts, each has the
files of its own ranks, copies of its neighbours' if the run keeps any, and the whole manifest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from dalsegno.checkpoint import checkpoint_dir, names
from dalsegno.errors import ConfigurationError
from dalsegno.system import filesystem
from dalsegno.system.machine import boot_id, host_name

PLACE_VARIABLE = "DALSEGNO_SHARED_MEMORY"
"""Environment variable: a directory in memory (tmpfs) to use instead of ``/dev/shm``."""

_OWNER = "owner.json"
_NAME = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class MemoryDir:
    """The directory ``path`` of the run in ``output_dir``, where that was when its leg began.

    ``inode``: device and inode of ``output_dir``, which stay the same if that is moved. Another container that shares
    this memory may have another directory of that path.
    """

    path: Path
    output_dir: Path
    inode: tuple[int, int] | None

    def is_of(self, output_dir: Path) -> bool:
        """Whether the run is the one in ``output_dir``, as this process sees that directory."""
        return self.inode is not None and self.inode == _inode(output_dir)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        return self.path / names.CHECKPOINTS

    @property
    def newest_step(self) -> int | None:
        """Step of its newest checkpoint, valid or not; None if it has none."""
        return next(iter(checkpoint_dir.published(self.checkpoints)), None)

    @property
    def size(self) -> int:
        return size_of([self])


def size_of(directories: Iterable[MemoryDir]) -> int:
    """Bytes of memory that the files of these directories take together: a file with several names takes it once."""
    sizes = {}
    for each in directories:
        for folder, _, files in os.walk(each.path):
            for name in files:
                with contextlib.suppress(FileNotFoundError):  # a live run renames and removes
                    status = Path(folder, name).lstat()
                    sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def root() -> Path:
    """Directory that contains all of this user's."""
    return Path(os.environ.get(PLACE_VARIABLE) or "/dev/shm") / f"dalsegno-{os.geteuid()}"


def place() -> object:
    """Identifies the memory that this process uses: equal for processes that see the same one."""
    return boot_id() or host_name(), _inode(root().parent)


def name_of(checkpoint: Path) -> str | None:
    """Name of the directory that contains a memory checkpoint, by its path alone; None for any other path."""
    name = checkpoint.parent.parent.name
    return name if checkpoint.is_absolute() and _NAME.fullmatch(name) else None


def create(output_dir: Path, name: str) -> MemoryDir:
    """Create the directory ``name`` for the run in ``output_dir``, unless it exists. Raises ConfigurationError if this
    host has no shared memory that this user can write to."""
    created = MemoryDir(root() / name, output_dir.resolve(), _inode(output_dir))
    try:
        if not root().parent.is_dir():
            raise FileNotFoundError(f"{root().parent} does not exist")
        for directory in (root(), created.path, created.checkpoints):
            filesystem.make_private_directory(directory)
        content = {"output_dir": str(created.output_dir), "inode": created.inode, "boot": boot_id() or ""}
        filesystem.write_durably(created.path / _OWNER, json.dumps(content).encode())
    except OSError as error:
        raise ConfigurationError(
            f"save_in_memory=: no memory checkpoints can be kept below {root().parent}: {error}; name another "
            f"directory in memory by the environment variable {PLACE_VARIABLE}, or leave save_in_memory out"
        ) from error
    return created


def find(name: str) -> MemoryDir | None:
    """The directory ``name``, of whatever run; None if it is gone."""
    return next((each for each in find_all() if each.name == name), None)


def containing(checkpoint: Path, output_dir: Path) -> MemoryDir | None:
    """The directory of the run in ``output_dir`` that ``checkpoint`` is in; None if it is in no such directory."""
    directory = find(checkpoint.parent.parent.name)
    if directory is None or not directory.is_of(output_dir):
        return None
    return directory if checkpoint.resolve().parent == directory.checkpoints.resolve() else None


def find_all() -> list[MemoryDir]:
    """This user's directories on this host, in any order."""
    opened = [_opened(path) for path in (root().iterdir() if _is_own(root()) else ()) if _NAME.fullmatch(path.name)]
    return [each for each in opened if each is not None]


def remove(directory: MemoryDir) -> None:
    """Free the memory of a directory, which another process may be removing too."""
    with contextlib.suppress(FileNotFoundError):
        filesystem.remove(directory.path)


def remove_others(output_dir: Path, keep: Collection[MemoryDir] = ()) -> None:
    """Remove all directories of the run in ``output_dir`` but ``keep``: no leg resumes from them any more."""
    for each in find_all():
        if each.is_of(output_dir) and each not in keep:
            remove(each)


def _is_own(path: Path) -> bool:
    """Whether ``path`` is a directory that only this user can write to."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _opened(path: Path) -> MemoryDir | None:
    try:
        content = json.loads((path / _OWNER).read_bytes())
        if content["boot"] != (boot_id() or ""):  # in a directory that is not in memory
            return None
        device, number = content["inode"]
        return MemoryDir(path, Path(content["output_dir"]), (device, number))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
