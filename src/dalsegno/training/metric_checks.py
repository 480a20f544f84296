"""Checks that evaluations take place, and measure the metrics that callbacks and retention rules need.

Otherwise a misspelt metric or a forgotten evaluation set would only show in what is missing at the end.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping

from dalsegno.args import TrainingArguments
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events.callback import Callback
from dalsegno.policies.retention import Best, retention_of, rules_of

logger = logging.getLogger("dalsegno")

_MAX_SEARCHED = 10_000
"""Steps: a longer run is not searched for one that is both saved and evaluated."""


def expect_evaluations(args: TrainingArguments, callbacks: Iterable[Callback], *, has_sets: bool) -> None:
    """Warn if evaluations are needed, but none is due. To be called before a leg trains.

    Raises:
        ConfigurationError: if a callback or a rule of ``keep=`` needs evaluations, and there is no evaluation set.
    """
    waiting = [callback.key for callback in callbacks if callback.needs_evaluations]
    if args.keep is not None and _best_rules(args):
        waiting.append(f"keep={args.keep!r}")
    if not waiting:
        return
    if not has_sets:
        raise ConfigurationError(
            f"{waiting[0]} needs evaluations, and there is no evaluation set: pass eval_dataset= or eval_dataloader= "
            "(to ds.Run: evaluate=)"
        )
    if not args.evaluation:
        logger.warning("%s needs evaluations, but none is scheduled: set eval_steps", waiting[0])
    elif _best_rules(args) and _never_meet(args):
        logger.warning(
            "keep=%r: no checkpoint is due at a step that is evaluated (saving %s, evaluating %s), so none is kept as "
            "one of the best; add OnBest() to save=, or make save_steps a multiple of eval_steps",
            args.keep,
            args.saving,
            args.evaluation,
        )


def expect_metrics(args: TrainingArguments, metrics: Mapping[str, float]) -> None:
    """Check the metrics of all sets.

    Raises:
        UnknownName: if the metric of a rule of ``keep=`` is missing; the message suggests the nearest.
    """
    for rule in _best_rules(args):
        name = rule.metric or args.best_metric_name
        if not {name, f"eval_{name}"} & metrics.keys():
            raise UnknownName(f"metric in keep={args.keep!r}:", name, metrics)


def _never_meet(args: TrainingArguments) -> bool:
    """Whether both schedules count steps only, and no step of the run is due for both."""
    saving, evaluation, last = args.saving, args.evaluation, args.max_steps
    if saving.on_best or saving.interval_s < math.inf or not 0 < last <= _MAX_SEARCHED:
        return False
    if any(trigger.at_epoch(epoch) for trigger in (saving, evaluation) for epoch in range(1, last + 1)):
        return False
    return not any(evaluation.at_step(step) and (step == last or saving.at_step(step)) for step in range(1, last + 1))


def _best_rules(args: TrainingArguments) -> list[Best]:
    rules = () if args.keep is None else rules_of(retention_of(args.keep))
    return [rule for rule in rules if isinstance(rule, Best)]
