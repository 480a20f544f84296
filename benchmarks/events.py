"""What an event costs that ten registered callbacks do not handle, and one that all ten do."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import dalsegno as ds
from dalsegno.events.contexts import Context, StepEndContext
from dalsegno.events.dispatcher import Dispatcher
from dalsegno.state import TrainerControl

from .peers import PeerMissing, ask
from .row import Row, duration, three_digits
from .timing import ROUNDS, Figure, figure, ratio, seconds_each

TEN = range(10)
PEERS = {"torchtnt": "torchtnt", "ignite": "Ignite", "hf": "HF Trainer", "lightning": "Lightning"}

UNHANDLED = "event without handlers"
PLAIN = "event handled by 10"
PAYLOAD = "on_step_end with its payload, handled by 10"
IN_A_LOOP = "ten bare calls in a for loop"
WRITTEN_OUT = "ten bare calls written out"

OF_TORCHTNT = 0.5
OF_TEN_CALLS = 1.5

SMALL = {"rounds": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


class Listener(ds.Callback):
    def on_step_begin(self, ctx: Context) -> None:
        pass

    def on_step_end(self, ctx: StepEndContext) -> None:
        pass


def run(rounds: int = ROUNDS) -> list[Row]:
    seconds_of = _ours(rounds)
    ours = {name: figure(seconds) for name, seconds in seconds_of.items()}
    rows = []
    for what in (PLAIN, PAYLOAD):
        for calls in (IN_A_LOOP, WRITTEN_OUT):
            measured = ratio(seconds_of[what], seconds_of[calls])
            rows.append(_row(what, ours[what], calls, ours[calls], measured, OF_TEN_CALLS))
    for system, name in PEERS.items():
        try:
            theirs = ask("events", system)
        except PeerMissing as missing:
            rows.append(Row(UNHANDLED, duration(ours[UNHANDLED]), f"{name} {missing}"))
            continue
        for what, seconds in ((UNHANDLED, theirs["unhandled"]), (PLAIN, theirs["handled"])):
            limit = OF_TORCHTNT if (system, what) == ("torchtnt", UNHANDLED) else None
            rows.append(_row(what, ours[what], name, seconds, ours[what] / seconds, limit))
    return rows


def _ours(rounds: int) -> dict[str, list[float]]:
    """Seconds, round by round, of each kind of event, fired as the loop fires it, and of the ten bare calls."""
    on = _dispatcher([Listener() for _ in TEN])
    handlers, context = list(on.step_begin), on.step_begin.context
    calls = [f"handler{number}" for number in TEN]
    return seconds_each(
        {
            UNHANDLED: ("if on.step_done:\n on.step_done.fill(7)\n on.step_done.fire()", "on = dispatcher"),
            PLAIN: ("if on.step_begin:\n on.step_begin.fire()", "on = dispatcher"),
            PAYLOAD: (
                "if on.step_end:\n on.step_end.fill(loss, grad_norm, lr)\n on.step_end.fire()",
                "on, loss, grad_norm, lr = dispatcher, 2.5, 1.0, 3e-4",
            ),
            IN_A_LOOP: ("for handler in listening: handler(ctx)", "listening, ctx = handlers, context"),
            WRITTEN_OUT: (
                "\n".join(f"{call}(ctx)" for call in calls),
                f"{', '.join(calls)} = handlers\nctx = context",
            ),
        },
        {"dispatcher": on, "handlers": handlers, "context": context},
        rounds,
    )


def _dispatcher(callbacks: list[Listener]) -> Dispatcher:
    for number, callback in enumerate(callbacks):
        callback.name = f"listener {number}"
    context_fields: dict[str, Any] = {field.name: None for field in fields(Context)} | {"control": TrainerControl()}
    dispatcher = Dispatcher(context_fields)
    dispatcher.bind(callbacks)
    return dispatcher


def _row(what: str, ours: Figure, name: str, theirs: float, measured: float, limit: float | None) -> Row:
    """``measured``: the ratio, whose spread is known if both were measured in the same rounds."""
    return Row(
        what,
        duration(ours),
        f"{name}: {duration(theirs)}",
        f"{three_digits(measured)} ×",
        "" if limit is None else f"≤ {limit} ×",
        None if limit is None else measured <= limit,
        measured.spread if isinstance(measured, Figure) else ours.spread,
    )
