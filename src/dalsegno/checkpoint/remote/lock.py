"""Remote lock: a file at the URL that names the process that trains there, like the lock in a local directory.

No kernel holds such a lock: the file of a killed process stays. On the same host its process is known to be dead.
Another host cannot see whether it is alive, so the file counts as held, as in a directory that hosts share.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from dalsegno.errors import Locked
from dalsegno.system.lock import Holder

from .store import Store

FILE_NAME = ".lock"


class RemoteLock:
    """One live process at a time at a URL. If two take it at the same moment, both train, and one stops sending."""

    _held_here: set[str] = set()  # tokens: a restarted container may have the same host and pid

    def __init__(self, store: Store) -> None:
        self._store = store
        self._token: str | None = None

    def take(self, *, take_over: bool) -> None:
        """Take the lock.

        Args:
            take_over: ignore a lock that a process on another host left.

        Raises:
            Locked: if another process or this one holds the lock, or a process on another host may hold it.
        """
        holder = self._holder()
        if holder is not None:
            if holder.token in self._held_here if holder.is_me() else holder.lives_here():
                raise Locked(f"{self._store.url}: in use by {holder}; wait for it, stop it, or use another output_dir")
            if not take_over:
                holder.raise_if_maybe_alive(self._store.url, FILE_NAME)
        me = Holder.here()
        self._store.write(FILE_NAME, json.dumps(asdict(me)).encode())
        self._token = me.token
        self._held_here.add(me.token)

    def check(self) -> None:
        """
        Raises:
            Locked: if another process has taken the lock over.
        """
        holder = self._holder()
        if holder is None or holder.token != self._token:
            other = holder or "an unknown process"
            raise Locked(f"{self._store.url}: was taken over by {other} while this process trained")

    def drop(self) -> None:
        """Release the lock, unless another process holds it by now."""
        token, self._token = self._token, None
        if token is None:
            return
        self._held_here.discard(token)
        holder = self._holder()
        if holder is not None and holder.token == token:
            self._store.delete([FILE_NAME])

    def _holder(self) -> Holder | None:
        return Holder.parse(self._store.read(FILE_NAME) or b"")
