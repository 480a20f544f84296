"""Remote lock: a file at the URL that names the process that trains there, like the lock in a local directory.

No kernel holds such a lock: the file of a killed process stays. Where this process would see it (on the same host, in
the same pid namespace), it is known to be dead; elsewhere its lease expires, as in a directory that hosts share.
"""

from __future__ import annotations

from dalsegno.system.lease import LOCK, Lease, outlast, read_holder

from .store import Store


class RemoteLock:
    """One live process at a time at a URL."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lease: Lease | None = None

    def take(self, *, take_over: bool) -> None:
        """Take the lock; with ``take_over``, also from a process that this one cannot see. Otherwise, waits for such a
        holder until it renews its lease, or the lease has expired.

        Raises:
            Locked: if another process or this one holds the lock, or one that this process cannot see may hold it.
        """
        holder = read_holder(self._store)
        if holder is not None:
            if Lease.is_of_this_process(holder) if holder.is_me() else holder.lives_here():
                raise holder.refuse(self._store.url)
            if not (take_over or holder.is_dead()):
                holder = outlast(self._store, self._store.url, holder)
        lease = Lease(self._store, self._store.url)
        lease.acquire(holder)
        self._lease = lease

    def check(self) -> None:
        """Raises LeaseLost if another process has taken the lock over."""
        if self._lease is not None:
            self._lease.confirm()

    def loss(self) -> str | None:
        """Why nothing more may be sent, once that is known. Does not ask the store, which may not answer."""
        return None if self._lease is None else self._lease.loss

    def drop(self) -> None:
        """Release the lock, unless another process holds it by now."""
        lease, self._lease = self._lease, None
        if lease is not None and lease.release():
            self._store.delete([LOCK])
