"""Compatibility: what the user changed between two legs, setting by setting, and the effect of each change.

Settings are plain values by name, passed by the run. The rules below give the severity of a change:

* ``info``: the new value takes effect, and the report lists it;
* ``warning``: the run resumes, but not as one that was never interrupted;
* ``error``: the saved state belongs to something else. ``allow_changes=`` permits the change by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from dalsegno.data import fingerprint
from dalsegno.data.mixture import Plan
from dalsegno.errors import StateMismatch, expect_known
from dalsegno.stateful.schema import Must, check

Severity = Literal["info", "warning", "error"]

Value = Any
"""A JSON value."""

Plain = bool | str | int | float | None | list[Any] | dict[str, Any]


def _is_sample(sample: list[Any]) -> bool:
    check(tuple(sample), tuple[str, float, float], "sample")
    return True


class DatasetValue(TypedDict):
    """The setting ``dataset``, from :func:`dalsegno.data.fingerprint.fingerprint`."""

    type: str
    length: int | None
    fingerprint: str | None
    samples: list[Annotated[list[Any], Must("a text and two numbers", _is_sample)]] | None
    plan: NotRequired[Plan]
    """Of a mixture."""


@dataclass(frozen=True, slots=True)
class Rule:
    severity: Severity
    effect: str
    same: Callable[[Value, Value], bool] = lambda saved, now: bool(saved == now)


@dataclass(frozen=True, slots=True)
class Change:
    setting: str
    saved: str
    now: str
    severity: Severity
    effect: str
    details: tuple[str, ...] = ()
    """Further lines, one per tensor that does not fit."""

    @property
    def headline(self) -> str:
        if self.saved == self.now:
            return f"{self.setting}: the checkpoint does not fit this {self.now}"
        return f"{self.setting}: saved {self.saved}, now {self.now}"

    def __str__(self) -> str:
        return f"{self.headline} ({self.effect})"

    @classmethod
    def of_part(cls, part: str, saved: str, now: str, details: Iterable[str] = ()) -> Change:
        """A change of a component with tensors: model, loss function, optimizer."""
        return cls(part, saved, now, RULES[part].severity, RULES[part].effect, tuple(details))


END_OF_SCHEDULE = "max_steps of the schedule"
"""Name of the run's length if the learning rate schedule depends on it."""

_OTHER_BITS = "sums are rounded differently: the run is no longer bitwise equal to one without this change"

_OTHER_TENSORS = Rule(
    "error", "tensors that fit are loaded, cast if needed, with their optimizer state; all others stay as built"
)
_OTHER_SCHEDULE = Rule("warning", "the learning rate jumps to its value in the new schedule")
_RESHARDED = Rule("info", "state is resharded; the data resumes at the same sample")
_SAME_SAMPLE = Rule("info", "the data resumes at the same sample")

SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs", "min_lr", "decay_ratio", "warmup_steps", "warmup_ratio")
"""Settings of the default learning rate schedule."""

RULES: dict[str, Rule] = {
    # what the saved state was computed for
    "dataset": Rule(
        "error",
        "resumes after the same number of samples, in the new order: some come twice, some never",
        fingerprint.same,
    ),
    "model": _OTHER_TENSORS,
    "loss_fn": _OTHER_TENSORS,
    "optimizer": Rule("error", "starts without state, at the learning rate that it was built with"),
    # what makes the run differ from one that was never interrupted
    "samples per step": Rule(
        "warning", "gradients are means over more or fewer samples; learning_rate= is not scaled with them"
    ),
    "seed": Rule("warning", "random generators and the order of a map dataset continue from the saved seed"),
    "data_seed": Rule("warning", "the order of a map dataset continues from the saved seed"),
    "dataloader_drop_last": Rule("warning", "the length of epochs changes"),
    "lr_scheduler": Rule("warning", "the saved position is loaded into a schedule of another class"),
    **dict.fromkeys((*SCHEDULE, END_OF_SCHEDULE), _OTHER_SCHEDULE),
    "gathered_dtype": Rule("warning", "FSDP rounds parameters to another dtype: the run differs from here on"),
    "order of parameters": Rule("warning", f"the optimizer's state is found by name, but {_OTHER_BITS}"),
    **dict.fromkeys(("torch", "processor", "threads"), Rule("warning", _OTHER_BITS)),
    # what the user may change
    "optim": Rule("info", "the saved implementation of the same optimizer is used, fused or not"),
    "learning_rate": Rule("info", "the schedule continues from its position, at the new rate"),
    "mesh": _RESHARDED,
    "world_size": _RESHARDED,
    "per_device_train_batch_size": _SAME_SAMPLE,
    "gradient_accumulation_steps": _SAME_SAMPLE,
    "gradient_accumulation_schedule": _SAME_SAMPLE,
    "sequence_length_schedule": Rule("warning", "sequences are cut to other lengths"),
    "optimizer.*": Rule("info", "the checkpoint's value is used: it is part of your optimizer's state"),
}
"""By setting; ``name.*`` covers all with that prefix. The new value of any other setting takes effect."""

REFUSED = tuple(name for name, rule in RULES.items() if rule.severity == "error")
"""Names that ``allow_changes=`` accepts."""


def compare(saved: Mapping[str, Value], now: Mapping[str, Value]) -> list[Change]:
    """Settings that both have and that differ; errors first, then warnings, then infos."""
    check(saved, dict[str, Plain], "settings")
    if "dataset" in saved:
        check(saved["dataset"], DatasetValue, "settings.dataset")
    order: list[Severity] = ["error", "warning", "info"]
    changes = [
        Change(name, _shown(saved[name]), _shown(value), rule.severity, rule.effect)
        for name, value in now.items()
        if name in saved and not (rule := _rule(name)).same(saved[name], value)
    ]
    return sorted(changes, key=lambda change: order.index(change.severity))


_NOT_FELT = re.compile(r"(logging|save|eval|keep|max_failed|metric_for|greater|load_best|max_steps|num_train)\w*")
"""Settings that do not change what a step computes."""


def reasons_to_differ(saved: Mapping[str, Value], now: Mapping[str, Value]) -> list[str]:
    """Settings that both have and that differ, in words, of those that change what a step computes."""
    return [each.headline for each in compare(saved, now) if not _NOT_FELT.fullmatch(each.setting)]


def check_allowed(names: Iterable[str]) -> frozenset[str]:
    """``allow_changes=`` as a set. Raises UnknownName for a name not in :data:`REFUSED`."""
    allowed = frozenset(names)
    expect_known("change in allow_changes", allowed, REFUSED)
    return allowed


def raise_if_incompatible(changes: Iterable[Change], allowed: Collection[str], where: object) -> None:
    """Raises StateMismatch for changes that are errors and not ``allowed``, and names how to allow them."""
    refused = [change for change in changes if change.severity == "error" and change.setting not in allowed]
    if not refused:
        return
    lines = []
    for change in refused:
        lines += [change.headline, *(f"  {each}" for each in change.details)]
    names = sorted({*allowed, *(change.setting for change in refused)}, key=REFUSED.index)
    wanted = ", ".join(f'"{name}"' for name in names) + ("," if len(names) == 1 else "")
    raise StateMismatch(
        f"{where}: the saved state does not fit this run; nothing was loaded:\n  "
        + "\n  ".join(lines)
        + f"\nto load it all the same, set allow_changes=({wanted}):\n  "
        + "\n  ".join(f"{change.setting}: {change.effect}" for change in refused)
    )


def _rule(name: str) -> Rule:
    group = f"{name.partition('.')[0]}.*"
    return RULES.get(name) or RULES.get(group) or Rule("info", "the new value takes effect")


def _of_plan(plan: Plan) -> str:
    ends = [*plan["bounds"], 1.0]
    shares = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    parts = [
        f"{100 * share:.3g} % {name}, {length:,} samples"
        for share, name, length in zip(shares, plan["datasets"], plan["lengths"], strict=True)
    ]
    return f" ({'; '.join(parts)}; seed={plan['seed']}, {plan['stopping_strategy']})"


def _shown(value: Value) -> str:
    if isinstance(value, dict) and "fingerprint" in value:  # of a dataset
        length = "" if value["length"] is None else f"{value['length']:,} samples of "
        return f"{length}{value['type']}{_of_plan(value['plan']) if 'plan' in value else ''}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text.encode(errors="backslashreplace").decode()  # a forged text may be one that no file can take
