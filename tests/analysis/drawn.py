"""A log made of series, for what draws: it has everything but files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from dalsegno.analysis import Restart, Series, Tail
from dalsegno.errors import UnknownName


class MadeUpLog:
    """Steps are 5 seconds and a hundredth of an epoch long."""

    def __init__(
        self,
        name: str,
        *series: Series,
        restarts: Sequence[Restart] = (),
        tails: Sequence[Tail] = (),
        clock: bool = True,
        loss: str = "loss",
    ) -> None:
        self.name = name
        self._loss = loss
        self._series = {each.name: self._told(each, clock) for each in series}
        self._restarts, self._tails = restarts, tails

    @property
    def loss(self) -> str | None:
        return self._loss if self._loss in self._series else None

    def metrics(self) -> list[str]:
        return list(self._series)

    def metric(self, name: str) -> Series:
        if name not in self._series:
            raise UnknownName("metric", name, self._series)
        return self._series[name]

    def series(self, names: Iterable[str]) -> dict[str, Series]:
        return {name: self.metric(name) for name in names}

    def restarts(self) -> Sequence[Restart]:
        return self._restarts

    def tails(self) -> Sequence[Tail]:
        return self._tails

    def _told(self, series: Series, clock: bool) -> Series:
        if not clock:
            return replace(series, run=self.name)
        steps = series.steps.astype(np.float64)
        return replace(series, run=self.name, epochs=steps / 100, times=1.7e9 + 5 * steps)
