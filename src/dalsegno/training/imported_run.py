"""ImportedRun: what the first leg after an import does besides loading the checkpoint of another program."""

from __future__ import annotations

import math
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from dalsegno.data.loader import IMPORTED, ImportedPlace, ResumableLoader
from dalsegno.distributed.rng import preserved_generators
from dalsegno.stateful.schema import check

from .parts import RunParts


class ImportedRun:
    """Moves the data to where the other program was, and compares the schedule with its.

    Does nothing after a checkpoint of this trainer's own.
    """

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader
        self._place: ImportedPlace | None = None

    def adapt(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state to load: for an imported one, the start of its epoch."""
        if state["kind"] != IMPORTED:
            return state
        check(state, ImportedPlace, "loader")
        self._place = ImportedPlace(**state)  # type: ignore[typeddict-item]
        return {**self._loader.state_dict(), "epoch": state["epoch"]}

    def resume(self, parts: RunParts) -> list[str]:
        """Skip the samples of the epoch that the other program has read, and count them; returns notes for the user.
        All ranks skip alike, and draw no random numbers."""
        if self._place is None:
            return []
        loader, place = self._loader, self._place
        whole, consumed = _samples_per_epoch(loader), _consumed(place, loader)
        with preserved_generators():
            loader.skip(consumed or 0)
        parts.state.epoch = loader.position
        if whole is not None and not parts.state.samples_seen:
            parts.state.samples_seen = place["epoch"] * whole + (consumed or 0)
        where = "the start (the position within it is unknown)" if consumed is None else f"sample {consumed:,}"
        data = f"loader: continues at {where} of epoch {place['epoch']}, in this run's own order of the samples"
        return [data, *(jump for each in parts.schedulers if (jump := _jump(each)) is not None)]


def _jump(scheduler: Any) -> str | None:
    """How the learning rate here differs from that of the other program, whose schedule is known by its values only."""
    if not isinstance(scheduler, LambdaLR):
        return None
    step, saved = scheduler.last_epoch, scheduler.get_last_lr()
    here = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=False)]
    if all(math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12) for one, other in zip(here, saved, strict=False)):
        return None
    return f"learning rate: was {float(saved[0]):g}, is {float(here[0]):g} in the schedule here, from the next step on"


def _consumed(place: ImportedPlace, loader: ResumableLoader) -> int | None:
    """Samples of the epoch that are consumed, if its micro-batches have the size of those here; None if unknown."""
    whole, batch = _samples_per_epoch(loader), loader.samples_per_microbatch()
    if place["fraction"] == 0:
        return 0
    if batch is None:
        return None
    if place["microbatches"] is not None:
        return place["microbatches"] * batch
    if place["fraction"] is None or whole is None:
        return None
    return min(whole, round(place["fraction"] * -(-whole // batch)) * batch)


def _samples_per_epoch(loader: ResumableLoader) -> int | None:
    """Number over all ranks; for a loader that knows only its length, that of whole micro-batches."""
    samples, count, each = loader.samples_per_epoch(), loader.microbatches_per_epoch(), loader.samples_per_microbatch()
    return samples if samples is not None or count is None or each is None else count * each
