"""Registration: checks callbacks before anything runs, and registers callbacks for every run."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable

from dalsegno.errors import ConfigurationError, DuplicateKey

from .adapters import adapt
from .callback import Callback, refusal, register_globally, unregister_globally


def check_callbacks(callbacks: Iterable[object]) -> list[Callback]:
    """Adapt foreign callbacks, and those in lists among them; check that each is a callback, and that all have
    different keys."""
    checked: dict[str, Callback] = {}
    for given in (each for every in callbacks for each in (every if isinstance(every, list) else [every])):
        callback = adapt(given)
        other = checked.get(callback.key)
        if other is callback:
            raise DuplicateKey(f"callbacks: {callback.key!r} is given twice")
        if other is not None:
            raise DuplicateKey(
                f"callbacks: a {_class(other)} and a {_class(callback)} both have the key {callback.key!r}; "
                f"set name= on one of them, e.g. dalsegno.adapt({_class(callback)}(…), name={callback.key + '-2'!r})"
            )
        checked[callback.key] = callback
        _check_handlers(callback)
        _check_state(callback)
    return list(checked.values())


def instances(callbacks: Iterable[object]) -> list[object]:
    """Return the callbacks, with an instance in place of each class, as Hugging Face's Trainer takes them."""
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        name = callbacks if isinstance(callbacks, str) else type(callbacks).__name__
        raise ConfigurationError(f"callbacks={callbacks!r}; give a list: [{'' if callbacks is None else f'{name}(…)'}]")
    return [_instance(each) if isinstance(each, type) else each for each in callbacks]


def _instance(cls: type) -> object:
    if (error := refusal(cls)) is not None:
        raise ConfigurationError(
            f"callbacks: {cls.__name__} is a class whose constructor needs arguments ({error}); give an instance: "
            f"{cls.__name__}(…)"
        ) from None
    return cls()


def _class(callback: Callback) -> str:
    return type(inspect.unwrap(callback)).__name__  # type: ignore[arg-type]


def _check_handlers(callback: Callback) -> None:
    for event in callback.handled_events():
        if inspect.iscoroutinefunction(getattr(callback, event.handler)):
            raise ConfigurationError(
                f"{callback.key}.{event.handler} is async, which the training loop does not await; wrap the callback: "
                "dalsegno.Background(callback)"
            )


def _check_state(callback: Callback) -> None:
    for one, other in (("state_dict", "load_state_dict"), ("load_state_dict", "state_dict")):
        if hasattr(callback, one) and not hasattr(callback, other):
            near = difflib.get_close_matches(other, set(dir(callback)) - {one}, n=1, cutoff=0.7)
            hint = f"; is {near[0]!r} meant to be it?" if near else ""
            raise ConfigurationError(f"{callback.key} has {one} but no {other}: its state would be lost{hint}")


class GlobalHandle:
    """Keeps a callback registered for every run until :meth:`remove` is called. Further calls do nothing."""

    def __init__(self, callback: Callback) -> None:
        self._callback: Callback | None = callback
        register_globally(callback)

    def remove(self) -> None:
        if self._callback is not None:
            unregister_globally(self._callback)
            self._callback = None


def register_global_callback(callback: object) -> GlobalHandle:
    """Call ``callback``'s handlers in every run that starts from now on, after those of the run's own callbacks."""
    return GlobalHandle(*check_callbacks([callback]))
