"""Who counts on evaluations is told where none will come, or none with the metric that is looked for.

Else a misspelt metric, or a forgotten evaluation set, would only be found out by what is missing at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from dalsegno.args import TrainingArguments
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events.callback import Callback
from dalsegno.policies.retention import Best, retention_of, rules_of

logger = logging.getLogger("dalsegno")


def expect_evaluations(args: TrainingArguments, callbacks: Iterable[Callback], *, has_sets: bool) -> None:
    """To be called before a leg does anything.

    Raises:
        ConfigurationError: if there is nothing to evaluate on, and a callback or a rule of ``keep=`` needs that.
    """
    waiting = [callback.key for callback in callbacks if callback.needs_evaluations]
    if args.keep is not None and _best_rules(args):
        waiting.append(f"keep={args.keep!r}")
    if not waiting:
        return
    if not has_sets:
        raise ConfigurationError(
            f"{waiting[0]} needs evaluations, and there is nothing to evaluate on: give eval_dataset= or "
            "eval_dataloader= (a loop of your own: evaluate=)"
        )
    if not args.evaluation:
        logger.warning("%s needs evaluations, but none is due by itself: see eval_steps", waiting[0])


def expect_metrics(args: TrainingArguments, metrics: Mapping[str, float]) -> None:
    """To be called with the metrics of all sets.

    Raises:
        UnknownName: if none of them is the one by which a rule of ``keep=`` judges; the message names the nearest.
    """
    for rule in _best_rules(args):
        name = rule.metric or args.best_metric_name
        if not {name, f"eval_{name}"} & metrics.keys():
            raise UnknownName(f"metric in keep={args.keep!r}:", name, metrics)


def _best_rules(args: TrainingArguments) -> list[Best]:
    rules = () if args.keep is None else rules_of(retention_of(args.keep))
    return [rule for rule in rules if isinstance(rule, Best)]
