"""Resume a shuffled dataset half-way through an epoch, up to its first batch: from loader and saved state on."""

from __future__ import annotations

import time
import warnings
from statistics import median
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from dalsegno.data import train_loader

from .row import Row, duration, three_digits
from .timing import in_turns

BATCH = 32
ROUNDS = 5
LIMIT = 0.050
MILLIONS, BILLIONS = 10_000_000, 10_000_000_000


class Rows:
    """A dataset of any length that costs nothing to read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def run() -> list[Row]:
    """One row for each length; no peer can do the longer one, whose list of indices alone would fill 80 GB."""
    peer_state = _half_way(_peer(MILLIONS))
    seconds = in_turns(
        {
            "ours": lambda: _seconds_of_ours(MILLIONS),
            "ours, longer": lambda: _seconds_of_ours(BILLIONS),
            "peer": lambda: _seconds_of_peer(peer_state),
        },
        ROUNDS,
    )
    ours, longer, peer = (median(seconds[name]) for name in ("ours", "ours, longer", "peer"))
    target = f"under {duration(LIMIT)}"
    return [
        Row(
            "resume a shuffled dataset of 10 M rows to its first batch",
            duration(ours),
            f"StatefulDataLoader with torch's order {duration(peer)}",
            three_digits(ours / peer),
            target,
            ours < LIMIT,
        ),
        Row("the same, 10 G rows", duration(longer), "(80 GB of indices)", "", target, longer < LIMIT),
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


def _seconds_of_peer(state: dict[str, Any]) -> float:
    began = time.perf_counter()
    loader = _peer(MILLIONS)
    loader.load_state_dict(state)
    next(iter(loader))
    return time.perf_counter() - began


def _peer(length: int) -> StatefulDataLoader[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it calls something deprecated
        return StatefulDataLoader(Rows(length), BATCH, shuffle=True)


def _half_way(loader: StatefulDataLoader[Any]) -> dict[str, Any]:
    """The peer's state in the middle of an epoch, without reading half of it: the state after one batch, moved on."""
    next(iter(loader))
    state: dict[str, Any] = loader.state_dict()
    batches = MILLIONS // 2 // BATCH
    state["_sampler_iter_yielded"] = state["_num_yielded"] = batches
    batch_sampler = state["_sampler_iter_state"]
    batch_sampler["samples_yielded"] = batch_sampler["sampler_iter_state"]["yielded"] = batches * BATCH
    return state
