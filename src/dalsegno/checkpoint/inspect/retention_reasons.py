"""Why a checkpoint stays: by the rules that the run itself has stored, or by others. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.args import TrainingArguments
from dalsegno.checkpoint.listing import CheckpointInfo
from dalsegno.errors import ConfigurationError, DamagedCheckpoint
from dalsegno.policies.retention import Entry, Retention, rules_of

from .json_view import readable_states

ALL_STAY = "all stay"
"""The reason where there is no rule."""
NEWEST = "newest"
"""The reason why the newest whole checkpoint stays, whatever the rules say."""

_SETTINGS = (
    "keep",
    "save_total_limit",
    "save_strategy",
    "save_steps",
    "save",
    "eval_strategy",
    "eval_steps",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
)


def rule_of_run(found: Sequence[CheckpointInfo]) -> Retention | None:
    """The rule that the newest whole checkpoint was saved under; None if all stay, or it does not tell."""
    checkpoint = next((each.checkpoint for each in reversed(found) if each.entry is not None), None)
    if checkpoint is None:
        return None
    try:
        (settings,) = readable_states(checkpoint)["settings"]
        known = {name: settings[name] for name in _SETTINGS if name in settings}
        return TrainingArguments(".", **known).keeping
    except (KeyError, ValueError, TypeError, DamagedCheckpoint, ConfigurationError):
        return None


def reasons(rule: Retention | None, entries: Sequence[Entry]) -> dict[int, list[str]]:
    """By step, which parts of the rule keep a checkpoint, as they are written; none for one that goes.

    Args:
        rule: None keeps all.
        entries: the whole checkpoints of a run, oldest first.
    """
    if rule is None:
        return {entry.step: [ALL_STAY] for entry in entries}
    kept: dict[int, list[str]] = {entry.step: [] for entry in entries}
    for part in rules_of(rule):
        for step in part([entry for entry in entries if entry.finite]):
            kept[step].append(repr(part))
    for entry in entries[-1:]:
        kept[entry.step].append(NEWEST)
    return kept
