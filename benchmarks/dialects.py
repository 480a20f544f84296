"""What a callback in Hugging Face's style costs here, beside the same one under their own ``CallbackHandler``.

Both in this process, in turns: what the machine does besides falls on both. It needs transformers, and
``dalsegno/interop/hf``.
"""

from __future__ import annotations

from dataclasses import fields
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

import dalsegno as ds
from dalsegno.events.contexts import Context
from dalsegno.events.dispatcher import Dispatcher

from .peers.events import hf
from .row import Row, duration, three_digits
from .timing import ROUNDS, ratio, seconds_each

HANDLED = "event handled by 10 in Hugging Face's style"
UNHANDLED = "event that 10 in Hugging Face's style do not handle"

OF_THEIRS = 1.0

SMALL = {"rounds": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


class Listener:
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


OURS = {
    HANDLED: ("if on.step_begin:\n on.step_begin.fire()", "on = dispatcher"),
    UNHANDLED: ("if on.optimizer_step:\n on.optimizer_step.fire()", "on = dispatcher"),
}
"""Fired as the loop fires it."""


def run(rounds: int = ROUNDS) -> list[Row]:
    try:
        listeners = [ds.adapt(Listener(), "huggingface", name=f"listener {number}") for number in range(10)]
        theirs, their_names = hf()
    except (ImportError, ds.UnknownName) as missing:
        return [Row(what, "", f"not measured: {str(missing)[:100]}") for what in OURS]
    with TemporaryDirectory() as folder:
        names = {"dispatcher": _dispatcher(ds.TrainingArguments(folder), listeners), **their_names}
        seconds = seconds_each({**OURS, **theirs}, names, rounds)
    return [
        _row(what, seconds[what], seconds[their_name])
        for what, their_name in ((HANDLED, "handled"), (UNHANDLED, "unhandled"))
    ]


def _dispatcher(args: ds.TrainingArguments, callbacks: list[ds.Callback]) -> Dispatcher:
    context_fields: dict[str, Any] = {field.name: None for field in fields(Context)}
    context_fields |= {"args": args, "model": nn.Identity(), "state": ds.TrainerState(), "control": ds.TrainerControl()}
    dispatcher = Dispatcher(context_fields)
    dispatcher.bind(callbacks)
    return dispatcher


def _row(what: str, ours: list[float], theirs: list[float]) -> Row:
    times = ratio(ours, theirs)
    peer = f"HF Trainer: {duration(median(theirs))}"
    is_met = times <= OF_THEIRS
    return Row(what, duration(median(ours)), peer, f"{three_digits(times)} ×", f"≤ {OF_THEIRS} ×", is_met, times.spread)
