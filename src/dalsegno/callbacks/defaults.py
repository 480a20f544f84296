"""Callbacks that a run has without being passed them: the defaults, and the loggers of ``report_to``."""

from __future__ import annotations

import importlib
from collections.abc import Container, Iterable

from dalsegno.args.checks import TRACKERS
from dalsegno.callbacks.control.adjustments import GarbageCollection
from dalsegno.callbacks.loggers.info_callback import InfoCallback
from dalsegno.callbacks.loggers.progress_callback import ProgressCallback
from dalsegno.callbacks.profiling.speed import DefaultMetrics
from dalsegno.distributed import collectives
from dalsegno.events import Callback


def default_callbacks() -> list[Callback]:
    """Those that listen to every run unless they are removed; one of the user's own with the same key replaces one."""
    alone = collectives.world_size() == 1  # then no other rank waits for the garbage collector
    return [DefaultMetrics(), ProgressCallback(), InfoCallback(), *([] if alone else [GarbageCollection()])]


def reporting_callbacks(report_to: Iterable[str], without: Container[str] = ()) -> list[Callback]:
    """Return the loggers of the trackers in ``TrainingArguments(report_to=…)``, without those with these keys. Raises
    ConfigurationError if a tracker's library is not installed."""
    callbacks = importlib.import_module(__package__)
    return [getattr(callbacks, name)() for name in map(TRACKERS.__getitem__, report_to) if name not in without]
