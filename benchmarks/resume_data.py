"""Resume a shuffled dataset half-way through an epoch, up to its first batch: from loader and saved state on."""

from __future__ import annotations

import time
import warnings
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from dalsegno.data import train_loader

from .row import Row, count, duration, three_digits
from .timing import figure, in_turns

BATCH = 32
ROUNDS = 5
LIMIT = 0.050
MANY, MORE = 10_000_000, 10_000_000_000

SMALL = {"many": 1_000, "more": 10_000, "rounds": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


class Rows:
    """A dataset of any length that costs nothing to read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def run(many: int = MANY, more: int = MORE, rounds: int = ROUNDS) -> list[Row]:
    """One row for each length; no peer can do ten billion, whose list of indices alone would fill 80 GB."""
    peer_state = _half_way(_peer(many), many)
    seconds = in_turns(
        {
            "ours": lambda: _seconds_of_ours(many),
            "ours, longer": lambda: _seconds_of_ours(more),
            "peer": lambda: _seconds_of_peer(peer_state, many),
        },
        rounds,
    )
    ours, longer, peer = (figure(seconds[name]) for name in ("ours", "ours, longer", "peer"))
    target = f"under {duration(LIMIT)}"
    return [
        Row(
            f"resume a shuffled dataset of {count(many)} rows to its first batch",
            duration(ours),
            f"StatefulDataLoader with torch's order {duration(peer)}",
            three_digits(ours / peer),
            target,
            ours < LIMIT,
            ours.spread,
        ),
        Row(
            f"the same, {count(more)} rows",
            duration(longer),
            f"({count(8 * more)}B of indices)",
            "",
            target,
            longer < LIMIT,
            longer.spread,
        ),
    ]


def _seconds_of_ours(length: int) -> float:
    place = {
        "kind": "map",
        "epoch": 3,
        "cursor": length // 2,
        "length": length,
        "seed": 0,
        "shuffle": True,
    }
    began = time.perf_counter()
    feed = train_loader(Rows(length), batch_size=BATCH)
    feed.load_state_dict(place)
    next(iter(feed))
    return time.perf_counter() - began


def _seconds_of_peer(state: dict[str, Any], length: int) -> float:
    began = time.perf_counter()
    loader = _peer(length)
    loader.load_state_dict(state)
    next(iter(loader))
    return time.perf_counter() - began


def _peer(length: int) -> StatefulDataLoader[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it calls something deprecated
        return StatefulDataLoader(Rows(length), BATCH, shuffle=True)


def _half_way(loader: StatefulDataLoader[Any], length: int) -> dict[str, Any]:
    """The peer's state in the middle of an epoch, without reading half of it: the state after one batch, moved on."""
    next(iter(loader))
    state: dict[str, Any] = loader.state_dict()
    batches = length // 2 // BATCH
    state["_sampler_iter_yielded"] = state["_num_yielded"] = batches
    batch_sampler = state["_sampler_iter_state"]
    batch_sampler["samples_yielded"] = batch_sampler["sampler_iter_state"]["yielded"] = batches * BATCH
    return state
