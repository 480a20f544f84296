"""LogOptimizerParamGroup: the optimizer's current settings, in each record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dalsegno.errors import UnknownName
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import LogContext, TrainBeginContext

from .argument_checks import texts


class LogOptimizerParamGroup(Callback):
    """Logs each parameter group's learning rate or other settings in each training record, as ``<key>/<group>``.

    ``<group>`` is the group's ``name`` if it has a unique one, else its number. Values are read when the record is
    made: the learning rate is that of the next update.

    Args:
        keys: names of settings, such as ``["lr", "weight_decay"]``, or a single name.

    Raises:
        ConfigurationError: if there is no key, or a key is not a string.
        UnknownName: when training begins, if no group has the setting; the message names the nearest.
    """

    sets_control_flags = False

    def __init__(self, keys: str | Iterable[str]) -> None:
        self._keys = texts("LogOptimizerParamGroup", "keys", keys)

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        known = {key for group in ctx.optimizer.param_groups for key in group} - {"params"}
        for key in self._keys:
            if key not in known:
                raise UnknownName("LogOptimizerParamGroup: key", key, sorted(known))

    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.kind != "train":
            return
        groups = ctx.optimizer.param_groups
        for title, group in zip(_titles(groups), groups, strict=True):
            for key in self._keys:
                if key in group:
                    value = group[key]
                    is_number = hasattr(value, "__float__") and not isinstance(value, bool)
                    ctx.logs[f"{key}/{title}"] = float(value) if is_number else value


def _titles(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    titles = [str(group.get("name", number)) for number, group in enumerate(groups)]
    often = Counter(titles)
    return [title if often[title] == 1 else str(number) for number, title in enumerate(titles)]
