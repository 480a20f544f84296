"""Summary: a run in about twenty numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dalsegno.logs.values import is_wall_clock
from dalsegno.policies.retention import is_better_higher
from dalsegno.state import VERDICTS, Verdict

from .formats.source import LOSSES, is_of_evaluation, loss_of
from .lineage import FINISHED, LegSummary, State, state_of
from .series import Series, mean
from .spikes import Spike, find_spikes

THROUGHPUT = (
    *("tok_per_sec", "train_tokens_per_second", "train_samples_per_second", "train_steps_per_second"),
    *("steps_per_second", "mfu"),
)
GRADIENT = ("max_grad_norm", "grad_norm")
RATE = ("learning_rate", "lr", "train/learning_rate", "train/lr")
MEMORY = ("peak_mem",)
TOKENS = ("tokens", "num_input_tokens_seen", "total_tokens")

Metrics = Mapping[str, Callable[[], Series]]
"""Functions that read metrics, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSummary:
    """One metric over the run. Best, worst and average cover finite values only."""

    name: str
    records: int
    first: float
    final: float
    final_step: int
    best: float | None
    """The highest value if :func:`~dalsegno.policies.retention.is_better_higher`, else the lowest. None if no value is
    finite."""
    best_step: int | None
    worst: float | None
    worst_step: int | None
    average: float | None
    not_finite: int
    """Number of NaN and infinite values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run in about twenty numbers; None, or empty, for what its log does not contain."""

    run: str
    program: str
    """Program whose format the log has; empty if there is no log yet."""
    state: State
    records: dict[str, int]
    """Number of records of each kind."""
    step: int | None
    """Last step."""
    epoch: float | None
    loss: MetricSummary | None
    evaluation: tuple[MetricSummary, ...]
    grad_norm: MetricSummary | None
    learning_rate: MetricSummary | None
    tokens: float | None
    throughput: dict[str, float]
    """Mean of each metric of :data:`THROUGHPUT` over the time: all tokens by all seconds."""
    peak_mem: float | None
    """Bytes."""
    began: float | None
    """UTC seconds."""
    changed: float | None
    """UTC seconds of the last record, or of the end of the last leg."""
    training_seconds: float | None
    lost_seconds: float | None
    """Time between legs, but for that in which the run was finished."""
    restarts: int
    resumed: Verdict | None
    """The worst verdict about the legs that resumed: ``differs``, ``changed``, ``not proven``, ``exact``. None if there
    is none."""
    rollbacks: int
    """Returns to a checkpoint within a leg."""
    redone_steps: int
    """Steps that were repeated, by a later leg or after a rollback."""
    spikes: tuple[Spike, ...]
    """Spikes of the loss."""
    skipped: int
    """Number of lines or records that could not be read."""
    lost_records: int
    """Number of records that its logs have lost, as ``run.json`` counts them."""


def is_summarized(name: str) -> bool:
    """Whether a summary includes this metric."""
    others = (*THROUGHPUT, *GRADIENT, *RATE, *MEMORY, *TOKENS)
    return name in LOSSES or name in others or (is_of_evaluation(name) and not is_wall_clock(name))


def is_listed(name: str) -> bool:
    """Whether a brief summary includes this metric: a loss."""
    return "loss" in name and is_summarized(name)


def summarize(
    *,
    run: str,
    program: str,
    kinds: dict[str, int],
    goal: int | None,
    clock: Series,
    series: Metrics,
    legs: Sequence[LegSummary],
    skipped: int,
    brief: bool = False,
) -> Summary:
    """
    Args:
        kinds: number of records of each kind.
        goal: steps to train, if the log records it, as Hugging Face's does, which has no final record.
        clock: steps, epochs and times of all records.
        brief: do not look for spikes.
    """
    ends, epochs = _ends(clock.times), _ends(clock.epochs)
    alive = sum(each.ended - each.leg.started for each in legs)
    step = int(clock.steps.max()) if len(clock) else None
    is_done = kinds.get("final", 0) > 0 or (goal is not None and step is not None and 0 < goal <= step)
    loss = loss_of(series)
    of_loss = _summary(series, [loss] if loss else [])
    evaluation = [name for name in series if is_of_evaluation(name) and name != loss]
    memory = _summary(series, MEMORY)
    rollbacks = [each for summary in legs for each in summary.leg.rollbacks]
    return Summary(
        run=run,
        program=program,
        state=state_of(legs, is_done, of_loss is None or bool(np.isfinite(of_loss.final))),
        records=kinds,
        step=step,
        epoch=epochs[1] if epochs else None,
        loss=of_loss,
        evaluation=tuple(each for name in evaluation if (each := _summary(series, [name])) is not None),
        grad_norm=_summary(series, GRADIENT),
        learning_rate=_summary(series, RATE),
        tokens=tokens.final if (tokens := _summary(series, TOKENS)) else None,
        throughput=_throughput(series),
        peak_mem=memory.worst if memory else None,
        began=legs[0].leg.started if legs else ends[0] if ends else None,
        changed=max([*ends, *(each.ended for each in legs)], default=None),
        training_seconds=alive if legs else ends[1] - ends[0] if ends else None,
        lost_seconds=sum(each.idle or 0.0 for each in legs if each.reason not in FINISHED) if legs else None,
        restarts=max(0, len(legs) - 1),
        resumed=max((each.leg.resumed.verdict for each in legs if each.leg.resumed), key=VERDICTS.index, default=None),
        rollbacks=len(rollbacks),
        redone_steps=sum(each.redone for each in legs) + sum(each["from_step"] - each["to_step"] for each in rollbacks),
        spikes=tuple(find_spikes(series[loss]())) if loss and not brief else (),
        skipped=skipped,
        lost_records=sum(each.leg.lost_records for each in legs),
    )


def _throughput(series: Metrics) -> dict[str, float]:
    counted = next((series[name]() for name in TOKENS if name in series), None)
    rates = (
        (name, mean_rate(series[name](), None if "steps" in name else counted)) for name in THROUGHPUT if name in series
    )
    return {name: rate for name, rate in rates if rate is not None}


def mean_rate(rate: Series, tokens: Series | None) -> float | None:
    """Mean of a rate over time: the work of all intervals by the seconds that they took.

    None if it has no finite positive value. The first interval counts if it is the only one: its length is not known.

    Args:
        rate: work per second, in each interval.
        tokens: of the run up to each record, with which the work goes; without them it goes with the steps.
    """
    known = np.isfinite(rate.values) & (rate.values > 0)
    rates, done = rate.values[known], rate.steps[known].astype(np.float64)
    if not len(rates):
        return None
    if tokens is not None and len(tokens):
        places = np.minimum(np.searchsorted(tokens.steps, done), len(tokens) - 1)
        if (tokens.steps[places] == done).all() and np.isfinite(tokens.values[places]).all():
            done = tokens.values[places]
    work = np.diff(done)
    is_new = work > 0  # not repeated after a rollback
    with np.errstate(over="ignore"):
        return float(work[is_new].sum() / (work / rates[1:])[is_new].sum()) if is_new.any() else float(rates[-1])


def _summary(curves: Metrics, names: Sequence[str]) -> MetricSummary | None:
    """Of the first of ``names`` that there is; None if it has no values."""
    series = next((curves[name]() for name in names if name in curves), None)
    if series is None or not len(series):
        return None
    values = series.values
    finite = np.isfinite(values)
    everything, any_known = bool(finite.all()), bool(finite.any())
    low = int((values if everything else np.where(finite, values, np.inf)).argmin())
    high = int((values if everything else np.where(finite, values, -np.inf)).argmax())
    best, worst = (high, low) if is_better_higher(series.name) else (low, high)
    return MetricSummary(
        name=series.name,
        records=len(values),
        first=float(values[0]),
        final=float(values[-1]),
        final_step=int(series.steps[-1]),
        best=float(values[best]) if any_known else None,
        best_step=int(series.steps[best]) if any_known else None,
        worst=float(values[worst]) if any_known else None,
        worst_step=int(series.steps[worst]) if any_known else None,
        average=mean(values if everything else values[finite]) if any_known else None,
        not_finite=0 if everything else int((~finite).sum()),
    )


def _ends(values: NDArray[np.float64] | None) -> list[float]:
    """Lowest and highest value, NaN ignored; empty if there is no other."""
    ends = [] if values is None else [float(np.fmin.reduce(values)), float(np.fmax.reduce(values))]
    return [] if np.isnan(ends).any() else ends
