"""Store: the files of one run at a URL, by their names relative to it. Whatever fsspec knows: s3, gs, memory …"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import Callback

from dalsegno.errors import ConfigurationError
from dalsegno.system.extras import how_to_install

PART = 16 << 20
"""Bytes: a larger file is sent in parts of this size, several at once."""

Moved = Callable[[int], object]
"""Told how many more bytes have been sent; what it raises breaks that off."""


class Store:
    """All methods raise OSError, or what the filesystem at hand raises, if the other side does not do as asked.

    Raises:
        ConfigurationError: if nothing is installed for such a URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._system, root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            extra = f"; {how_to_install('s3')}" if url.startswith("s3") else ""
            raise ConfigurationError(f"output_dir={url!r}: {error}{extra}") from error
        self._root = root.rstrip("/")

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Every file below ``folder``, and its bytes."""
        self._system.invalidate_cache()
        found = self._system.find(self._path(folder) if folder else self._root, detail=True)
        prefix = f"{self._root}/"
        return {path.removeprefix(prefix): int(info["size"] or 0) for path, info in found.items()}

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if there is none."""
        try:
            return bytes(self._system.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Put a small file there; one of that name is replaced."""
        self._make_parent(name)
        self._system.pipe_file(self._path(name), data)

    def send(self, local: Path, name: str, moved: Moved) -> None:
        """Put a file here there; one of that name is replaced once the new one is whole."""
        self._make_parent(name)
        self._system.put_file(str(local), self._path(name), callback=_Moves(moved), chunksize=PART)

    def receive(self, name: str, local: Path) -> None:
        """Put a file from there here."""
        self._system.get_file(self._path(name), str(local))

    def delete(self, names: Iterable[str]) -> None:
        """In this order; nothing happens where there is none."""
        for name in names:
            try:
                self._system.rm_file(self._path(name))
            except FileNotFoundError:
                continue

    def move(self, name: str, target: str) -> None:
        """Copy on the other side, then delete."""
        self._make_parent(target)
        self._system.copy(self._path(name), self._path(target))
        self._system.rm_file(self._path(name))

    def _make_parent(self, name: str) -> None:
        self._system.makedirs(posixpath.dirname(self._path(name)), exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class _Moves(Callback):  # type: ignore[misc]
    """fsspec says sometimes how far it is, and sometimes by how much it has advanced."""

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
