"""What the user has changed between two legs: setting by setting, what becomes of it, and why.

Settings are plain values by name, which the run hands over; the rules below say for each name whether a new value is

* **said**: it is the user's to change, and the report says so;
* **warned** of: the run goes on, but not as one run that was never cut;
* **refused**: the state that was saved belongs to something else. ``allow_changes=`` lets it pass by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

from dalsegno.data import fingerprint
from dalsegno.errors import StateMismatch, UnknownName
from dalsegno.stateful.schema import Must, check

Verdict = Literal["said", "warned", "refused"]

Value = Any
"""What JSON holds."""

Plain = bool | str | int | float | None | list[Any] | dict[str, Any]


def _is_look(sample: list[Any]) -> bool:
    check(tuple(sample), tuple[str, float, float], "sample")
    return True


class DatasetValue(TypedDict):
    """The setting ``dataset``: what :func:`dalsegno.data.fingerprint.fingerprint` gives."""

    type: str
    length: int | None
    fingerprint: str | None
    samples: list[Annotated[list[Any], Must("a text and two numbers", _is_look)]] | None


@dataclass(frozen=True, slots=True)
class Rule:
    """What is to be made of a change, and what becomes of the new value, in words."""

    verdict: Verdict
    effect: str
    same: Callable[[Value, Value], bool] = lambda saved, now: bool(saved == now)


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that is not what it was when the checkpoint was saved."""

    setting: str
    saved: str
    now: str
    verdict: Verdict
    effect: str
    details: tuple[str, ...] = ()
    """Further lines: each tensor that does not fit."""

    @property
    def headline(self) -> str:
        if self.saved == self.now:
            return f"{self.setting}: the checkpoint does not fit this {self.now}"
        return f"{self.setting}: saved {self.saved}, now {self.now}"

    def __str__(self) -> str:
        return f"{self.headline} ({self.effect})"

    @classmethod
    def of_part(cls, part: str, saved: str, now: str, details: Iterable[str] = ()) -> Change:
        """One of the parts that a checkpoint fits or not: model, optimizer."""
        return cls(part, saved, now, RULES[part].verdict, RULES[part].effect, tuple(details))


END_OF_SCHEDULE = "max_steps of the schedule"
"""The name of the run's length where the learning rate comes down by then."""

_OTHER_BITS = "sums are rounded otherwise: the run is no longer equal, bit by bit, to one without this change"

RULES: dict[str, Rule] = {
    # what the saved state belongs to
    "dataset": Rule(
        "refused",
        "goes on at the same number of samples, in the new order: some come twice, some never",
        fingerprint.same,
    ),
    "model": Rule(
        "refused", "what fits is loaded, cast if need be, its optimizer state too; all else begins as it was built"
    ),
    "loss_fn": Rule(
        "refused", "what fits is loaded, cast if need be, its optimizer state too; all else begins as it was built"
    ),
    "optimizer": Rule("refused", "its state begins anew, at the learning rate that it was built with"),
    # what makes it another course than that of a run that was never cut
    "samples per step": Rule("warned", "gradients are means over more or fewer samples; the learning rate stays"),
    "seed": Rule("warned", "random generators and the order of a map dataset go on from the saved one"),
    "data_seed": Rule("warned", "the order of a map dataset goes on from the saved one"),
    "dataloader_drop_last": Rule("warned", "epochs get another length"),
    "lr_scheduler": Rule("warned", "the saved place is loaded into another kind of schedule"),
    "lr_scheduler_type": Rule("warned", "the learning rate jumps to where the new schedule is"),
    "warmup_steps": Rule("warned", "the learning rate jumps to where the new schedule is"),
    END_OF_SCHEDULE: Rule("warned", "the learning rate jumps to where the new schedule is"),
    "torch": Rule("warned", _OTHER_BITS),
    "processor": Rule("warned", _OTHER_BITS),
    "threads": Rule("warned", _OTHER_BITS),
    # what is the user's to change
    "learning_rate": Rule("said", "the schedule goes on from its place, at the new rate"),
    "world_size": Rule("said", "resharded; the data goes on at the same sample"),
    "per_device_train_batch_size": Rule("said", "the data goes on at the same sample"),
    "gradient_accumulation_steps": Rule("said", "the data goes on at the same sample"),
    "optimizer.*": Rule("said", "the checkpoint's value is used: it comes back with your optimizer's state"),
}
"""By the setting's name; ``name.*`` stands for all that begin so, and any other setting is said, and obeyed."""

REFUSED = tuple(name for name, rule in RULES.items() if rule.verdict == "refused")
"""The names that ``allow_changes=`` knows."""


def compare(saved: Mapping[str, Value], now: Mapping[str, Value]) -> list[Change]:
    """The settings that both know and that differ: first what is refused, then what is warned of, then the rest."""
    check(saved, dict[str, Plain], "settings")
    if "dataset" in saved:
        check(saved["dataset"], DatasetValue, "settings.dataset")
    order: list[Verdict] = ["refused", "warned", "said"]
    changes = [
        Change(name, _shown(saved[name]), _shown(value), rule.verdict, rule.effect)
        for name, value in now.items()
        if name in saved and not (rule := _rule(name)).same(saved[name], value)
    ]
    return sorted(changes, key=lambda change: order.index(change.verdict))


def check_allowed(names: str | Collection[str]) -> frozenset[str]:
    """``allow_changes=`` as a set.

    Raises:
        UnknownName: for a name that nothing is refused by; the message names the nearest.
    """
    allowed = frozenset([names] if isinstance(names, str) else names)
    for name in allowed:
        if name not in REFUSED:
            raise UnknownName("change in allow_changes", name, REFUSED)
    return allowed


def raise_if_incompatible(changes: Iterable[Change], allowed: Collection[str], where: object) -> None:
    """
    Raises:
        StateMismatch: if any of ``changes`` is refused and not ``allowed``: all of them at once, and what to write.
    """
    refused = [change for change in changes if change.verdict == "refused" and change.setting not in allowed]
    if not refused:
        return
    lines = []
    for change in refused:
        lines += [change.headline, *(f"  {each}" for each in change.details)]
    names = sorted({*allowed, *(change.setting for change in refused)}, key=REFUSED.index)
    wanted = ", ".join(f'"{name}"' for name in names) + ("," if len(names) == 1 else "")
    raise StateMismatch(
        f"{where}: what was saved does not fit what is here; nothing has been loaded:\n  "
        + "\n  ".join(lines)
        + f"\nif that is meant, give allow_changes=({wanted}):\n  "
        + "\n  ".join(f"{change.setting}: {change.effect}" for change in refused)
    )


def _rule(name: str) -> Rule:
    group = f"{name.partition('.')[0]}.*"
    return RULES.get(name) or RULES.get(group) or Rule("said", "obeyed from now on")


def _shown(value: Value) -> str:
    """A value on one line."""
    if isinstance(value, dict):  # a dataset's fingerprint
        length = "some samples" if value["length"] is None else f"{value['length']:,} samples"
        return f"{length} of {value['type']}"
    return f"{value:g}" if isinstance(value, float) else str(value)
