"""Store: the files of one run at a URL, by name relative to the URL. Any filesystem of fsspec: s3, gs, memory, …"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import DEFAULT_CALLBACK, Callback

from dalsegno.errors import ConfigurationError
from dalsegno.system.imports import how_to_install

PART = 16 << 20
"""Bytes. A larger file is sent in parts of this size, several at once."""

Moved = Callable[[int], object]
"""Called with the number of bytes that were sent. An exception interrupts the transfer."""


class Store:
    """All methods raise OSError, or an exception of the filesystem's library, if the remote side fails. Raises
    ConfigurationError if no filesystem for such a URL is installed."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._system, root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            extra = f"; {how_to_install('s3')}" if url.startswith("s3") else ""
            raise ConfigurationError(f"output_dir={url!r}: {error}{extra}") from error
        self._root = root.rstrip("/")

    def sizes(self, directory: str = "") -> dict[str, int]:
        """Size in bytes of every file below ``directory``."""
        self._system.invalidate_cache()
        found = self._system.find(self._path(directory) if directory else self._root, detail=True)
        prefix = f"{self._root}/"
        return {path.removeprefix(prefix): int(info["size"] or 0) for path, info in found.items()}

    def read(self, name: str) -> bytes | None:
        """Content of a small file; None if it does not exist."""
        try:
            return bytes(self._system.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        self._make_parent(name)
        self._system.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file that does not exist yet; returns whether this call has. Atomic where the filesystem
        supports exclusive writes (S3: If-None-Match). Elsewhere, of two calls at the same moment the later one
        counts."""
        self._make_parent(name)
        if self.read(name) is not None:
            return False
        try:
            self._system.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        except Exception:  # s3fs: EINVAL if it exists; also after a retry of a request that has succeeded
            if (present := self.read(name)) is None:
                raise
            return present == data
        return True

    def send(self, local: Path, name: str, moved: Moved | None) -> None:
        """Upload a file. A file of that name is replaced once the new one is complete."""
        self._make_parent(name)
        callback = DEFAULT_CALLBACK if moved is None else _Moves(moved)
        self._system.put_file(str(local), self._path(name), callback=callback, chunksize=PART)

    def copy(self, name: str, target: str) -> bool:
        """Copy a file on the remote side; False if it does not exist, or the filesystem cannot copy."""
        self._make_parent(target)
        try:
            self._system.copy(self._path(name), self._path(target))
        except (FileNotFoundError, NotImplementedError):
            return False
        return True

    def receive(self, name: str, local: Path) -> None:
        self._system.get_file(self._path(name), str(local))

    def delete(self, names: Iterable[str]) -> None:
        """Delete files in this order; missing ones are skipped."""
        for name in names:
            try:
                self._system.rm_file(self._path(name))
            except FileNotFoundError:
                continue

    def move(self, name: str, target: str) -> None:
        self._make_parent(target)
        self._system.copy(self._path(name), self._path(target))
        self._system.rm_file(self._path(name))

    def _make_parent(self, name: str) -> None:
        self._system.makedirs(posixpath.dirname(self._path(name)), exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class _Moves(Callback):  # type: ignore[misc]
    """fsspec reports sometimes an absolute position, and sometimes an increment."""

    def __init__(self, moved: Moved) -> None:
        super().__init__()
        self._moved = moved

    def relative_update(self, inc: int = 1) -> None:
        super().relative_update(inc)
        self._moved(inc)

    def absolute_update(self, value: int) -> None:
        before = self.value
        super().absolute_update(value)
        self._moved(value - before)

    def branched(self, *args: Any, **kwargs: Any) -> Callback:
        return self
