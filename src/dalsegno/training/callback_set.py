"""CallbackSet: the callbacks of a run, in calling order, bound to its dispatcher."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

from torch import nn

from dalsegno.callbacks import default_callbacks, reporting_callbacks
from dalsegno.checkpoint import CALLBACKS, CallbackTensors
from dalsegno.events.adapters import adapt, external_global_callbacks
from dalsegno.events.callback import Callback, components_of, global_callbacks
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.events.registration import check_callbacks, instances
from dalsegno.stateful.component import Component, TensorHolder


class CallbackSet:
    """The engine's own callbacks, then the defaults, the user's and the global ones.

    Args:
        model: passed to callbacks that hold sharded tensors.
        given: as the user passes them; those of other libraries are adapted.
        report_to: names of trackers, as in TrainingArguments.

    Raises:
        ConfigurationError: for an object that is not a callback, a misspelt handler, or two callbacks with one key.
        EventNotFired: for a callback that handles an event which this loop cannot fire.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: nn.Module,
        given: Iterable[object],
        *,
        core: Sequence[Callback] = (),
        report_to: Iterable[str] = (),
    ) -> None:
        self._dispatcher = dispatcher
        self._model = model
        self._core = core
        self._users = _with_defaults(check_callbacks(given), report_to)
        self._tensors: list[CallbackTensors] = []
        self.rebind()

    @property
    def bound(self) -> list[Callback]:
        """All of them, in calling order."""
        return self._dispatcher.callbacks

    def add(self, callback: object) -> None:
        """Bind one more of the user's."""
        self._bind([*self._users, *check_callbacks(instances([callback]))])

    def remove(self, callback: object) -> Callback:
        """Unbind a callback, given itself, its key or its class, and return it. Of several of a class, the first.

        Raises:
            UnknownName: if it is not bound; the message suggests the nearest key.
        """
        removed = self._dispatcher.find(self._key_of(callback))
        self._bind([each for each in self._users if each is not removed])
        return removed

    def _key_of(self, callback: object) -> str:
        if isinstance(callback, str):
            return callback
        if isinstance(callback, type):
            found = [each.key for each in self.bound if isinstance(inspect.unwrap(each), callback)]  # type: ignore[arg-type]
            return found[0] if found else callback.__name__
        return adapt(callback).key

    def rebind(self) -> None:
        """Bind again: global callbacks may have been added or removed since."""
        self._bind(self._users)

    def _bind(self, users: list[Callback]) -> None:
        everywhere = [*global_callbacks(), *external_global_callbacks()]
        self._dispatcher.bind([*self._core, *users, *(each for each in everywhere if each not in users)])
        self._tensors = [
            CallbackTensors(f"{CALLBACKS}{each.key}", each, self._model)
            for each in self.bound
            if isinstance(each, TensorHolder)
        ]
        self._users = users

    def sharded_states(self) -> Sequence[CallbackTensors]:
        """State that is sharded over the ranks as the model is."""
        return self._tensors

    def components(self) -> list[Component]:
        """All other state of callbacks."""
        return components_of(self.bound)


def _with_defaults(users: list[Callback], report_to: Iterable[str]) -> list[Callback]:
    """The default callbacks, the user's, then the trackers; without those whose key the user's take."""
    taken = {callback.key for callback in users}
    trackers = reporting_callbacks(report_to, without=taken)
    return [*(callback for callback in default_callbacks() if callback.key not in taken), *users, *trackers]
