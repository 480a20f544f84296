"""What a callback in Hugging Face's style costs here, beside the same one under their own ``CallbackHandler``."""

from __future__ import annotations

from dataclasses import fields
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import dalsegno as ds
from dalsegno.contexts import Context
from dalsegno.dispatcher import Dispatcher

from .peers import PeerMissing, ask
from .row import Row, duration, three_digits
from .timing import seconds_each

HANDLED = "event handled by 10 in Hugging Face's style"
UNHANDLED = "event that 10 in Hugging Face's style do not handle"

OF_THEIRS = 1.0


class Listener(ds.TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


def run() -> list[Row]:
    ours = {name: median(seconds) for name, seconds in _ours().items()}
    try:
        theirs = ask("events", "hf")
    except PeerMissing as missing:
        return [Row(what, duration(seconds), f"HF Trainer {missing}") for what, seconds in ours.items()]
    return [_row(HANDLED, ours[HANDLED], theirs["handled"]), _row(UNHANDLED, ours[UNHANDLED], theirs["unhandled"])]


def _ours() -> dict[str, list[float]]:
    """Seconds, round by round, of each kind of event, fired as the loop fires it."""
    with TemporaryDirectory() as folder:
        on = _dispatcher(ds.TrainingArguments(folder))
        return seconds_each(
            {
                HANDLED: ("if on.step_begin:\n on.step_begin.fire()", "on = dispatcher"),
                UNHANDLED: ("if on.optimizer_step:\n on.optimizer_step.fire()", "on = dispatcher"),
            },
            {"dispatcher": on},
        )


def _dispatcher(args: ds.TrainingArguments) -> Dispatcher:
    surroundings: dict[str, Any] = {field.name: None for field in fields(Context)}
    surroundings |= {"args": args, "state": ds.TrainerState(), "control": ds.TrainerControl()}
    dispatcher = Dispatcher(lambda context: context(**surroundings))
    dispatcher.bind([ds.adapt(Listener(), name=f"listener {number}") for number in range(10)])
    return dispatcher


def _row(what: str, ours: float, theirs: float) -> Row:
    ratio = ours / theirs
    peer = f"HF Trainer: {duration(theirs)}"
    return Row(what, duration(ours), peer, f"{three_digits(ratio)} ×", f"≤ {OF_THEIRS} ×", ratio <= OF_THEIRS)
