"""Claim: the name of who trains at a URL, in a file there, as the lock in a folder has it.

Nothing there can be held as the kernel holds a lock: what a killed process leaves stays. On this host its process is
known to be dead; from another one nobody sees that, so it counts, as in a folder that hosts share.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from dalsegno.errors import Locked
from dalsegno.system.lock import Holder

from .store import Store

FILE_NAME = ".lock"


class RemoteLock:
    """One live process at a time at a URL. Two that begin in the same moment both do; one stops sending then."""

    _held_here: set[str] = set()  # tokens: another life of a container may well have the same host and pid

    def __init__(self, store: Store) -> None:
        self._store = store
        self._token: str | None = None

    def take(self, *, take_over: bool) -> None:
        """Hold it from now on.

        Args:
            take_over: what a process of another host has left does not count.

        Raises:
            Locked: if another process, or this one, holds it, or may do so on another host.
        """
        holder = self._holder()
        if holder is not None:
            if holder.token in self._held_here if holder.is_me() else holder.lives_here():
                raise Locked(f"{self._store.url}: in use by {holder}; wait for it, stop it, or use another output_dir")
            if not take_over:
                holder.expect_dead(self._store.url, FILE_NAME)
        me = Holder.here()
        self._store.write(FILE_NAME, json.dumps(asdict(me)).encode())
        self._token = me.token
        self._held_here.add(me.token)

    def check(self) -> None:
        """
        Raises:
            Locked: if it is no longer held: somebody has taken it over.
        """
        holder = self._holder()
        if holder is None or holder.token != self._token:
            raise Locked(f"{self._store.url}: has been taken over by {holder or 'somebody'} while this one trained")

    def drop(self) -> None:
        """Let go, unless another one holds it by now."""
        token, self._token = self._token, None
        if token is None:
            return
        self._held_here.discard(token)
        holder = self._holder()
        if holder is not None and holder.token == token:
            self._store.delete([FILE_NAME])

    def _holder(self) -> Holder | None:
        return Holder.parse(self._store.read(FILE_NAME) or b"")
