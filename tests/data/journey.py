"""A training run in miniature: it reads a feed, draws random numbers as a model would, and can be killed anywhere."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from dalsegno.checkpoint.codec import decode, encode
from dalsegno.data import ResumableLoader

Make = Callable[[], ResumableLoader]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def travel(make: Make, epochs: int, kills: Collection[Any] = (), cut: int | None = None) -> list[tuple[Any, ...]]:
    """All that a run of ``epochs`` epochs sees and draws, one entry a micro-batch.

    ``kills`` are the numbers of micro-batches (over the whole run, from 1) after which the process is replaced, and
    ``"epoch 1"`` for the moment before the first batch of epoch 1. Micro-batch ``cut`` ends its epoch early.
    """
    seed_all(0)
    feed, seen = make(), []
    while feed.epoch < epochs:
        killed = False
        for microbatch in feed:
            drawn = (torch.rand(1).item(), random.random(), np.random.random())
            counts = (microbatch.samples, microbatch.global_samples)
            seen.append((feed.epoch, feed.position, plain(microbatch.batch), counts, drawn))
            assert feed.started
            killed = len(seen) in kills
            if killed or len(seen) == cut:
                break
        if not killed:
            feed.next_epoch()
            assert not feed.started
        if killed or f"epoch {feed.epoch}" in kills:
            feed = reborn(make, feed)
            if killed and len(seen) == cut:
                feed.next_epoch()
    return seen


def reborn(make: Make, feed: ResumableLoader) -> ResumableLoader:
    """What a new process has after loading a checkpoint that the old one wrote last."""
    text, tensors = encode(feed.state_dict(), "loader")
    saved = decode(json.loads(json.dumps(text)), lambda name, *_: tensors[name], "loader")
    generators = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    feed.close()
    seed_all(999)
    fresh = make()
    fresh.load_state_dict(saved)
    assert str(fresh.state_dict()) == str(saved)
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    torch.set_rng_state(generators[2])
    return fresh
