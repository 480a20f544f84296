"""A loader that knows its own place: torchdata's StatefulDataLoader, or anything that does the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dalsegno.errors import StateMismatch

from .loader_feed import LoaderFeed


class StatefulFeed(LoaderFeed):
    """Micro-batches of a loader with ``state_dict`` and ``load_state_dict``; its own state is what is saved.

    What is asked of the loader is what torchdata's does: after each batch its state is the place behind that batch;
    an iterator made after ``load_state_dict`` goes on from there, or begins the next epoch if that one was finished.
    """

    _saved: Any = None  # the loader's state, not loaded yet
    _cut = False  # whether the epoch before this one was left early, so that the loader's state is inside of it
    _opened = False

    def _open(self) -> Iterator[Any]:
        self._announce_epoch()
        saved, anew = self._saved, self._cut
        self._saved, self._cut, self._opened = None, False, True
        if saved is None:
            return iter(self._loader)
        if hasattr(self._loader, "restart_on_stop_iteration"):
            # torchdata.nodes.Loader cannot tell an epoch that is over from one with nothing left, but we can.
            self._loader.restart_on_stop_iteration = False
            anew = self._microbatches == 0
        iterator = self._resumed(self._loader, saved)
        if anew:
            self._announce_epoch()  # once more: what was loaded says otherwise
            iterator = iter(self._loader)
        return iterator

    @staticmethod
    def _resumed(loader: Any, saved: Any) -> Iterator[Any]:
        loader.load_state_dict(saved)
        try:
            return iter(loader)
        except (AssertionError, KeyError) as error:  # how torchdata says it
            raise StateMismatch(
                f"the saved state of the {type(loader).__name__} does not fit it: {error!r}; resume with the same "
                f"number of worker processes (now {getattr(loader, 'num_workers', 'unknown')}), or start anew"
            ) from error

    def next_epoch(self) -> None:
        self._cut = self._microbatches > 0 and not self._exhausted
        super().next_epoch()

    def close(self) -> None:
        state = self.state_dict()
        super().close()
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        loader: Any = self._loader
        inner = loader.state_dict() if self._opened and self._saved is None else self._saved
        return {**self._place("stateful"), "cut": self._cut, "loader": inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved place.

        Raises:
            StateMismatch: if it lies in another kind of data; on iterating, if the loader does not take its state back.
        """
        self._go_to(state, "stateful")
        self._cut, self._saved = state["cut"], state["loader"]
        self._opened = False
