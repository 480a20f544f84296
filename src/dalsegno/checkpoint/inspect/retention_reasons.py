"""Why each checkpoint is kept, by the retention rule that the run stored or by another one. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.args import TrainingArguments
from dalsegno.checkpoint.inspect.listing import CheckpointInfo
from dalsegno.errors import DamagedCheckpoint
from dalsegno.policies.retention import CheckpointSummary, Retention, rules_of

from .json_view import readable_states

ALL_STAY = "all stay"
"""Reason if there is no rule."""
NEWEST = "newest"
"""Reason for the newest valid checkpoint, which every rule keeps."""

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
    """Retention rule that the newest valid checkpoint was saved under; None if it keeps all, or cannot be read."""
    checkpoint = next((each.checkpoint for each in reversed(found) if each.summary is not None), None)
    if checkpoint is None:
        return None
    try:
        (settings,) = readable_states(checkpoint)["settings"]
        known = {name: settings[name] for name in _SETTINGS if name in settings}
        return TrainingArguments(".", **known).keeping
    except (KeyError, ValueError, TypeError, DamagedCheckpoint):
        return None


def reasons(rule: Retention | None, entries: Sequence[CheckpointSummary]) -> dict[int, list[str]]:
    """By step, the parts of the rule (None keeps all) that keep the checkpoint, as the user wrote them; empty if none
    does. ``entries``: the valid checkpoints of a run, oldest first."""
    if rule is None:
        return {entry.step: [ALL_STAY] for entry in entries}
    kept: dict[int, list[str]] = {entry.step: [] for entry in entries}
    for part in rules_of(rule):
        for step in part([entry for entry in entries if entry.finite]):
            kept[step].append(repr(part))
    for entry in entries[-1:]:
        kept[entry.step].append(NEWEST)
    return kept
