"""Ranks that are started again find each other, and not what the former ones have left in torchrun's store; and they
may open the sockets for it."""

from __future__ import annotations

import logging
import resource
from concurrent.futures import Future, ThreadPoolExecutor

from torch.distributed import HashStore

from dalsegno.distributed.parallel.torchrun import allow_descriptors, unique_prefix
from dalsegno.testing import run_ranks


def start(pool: ThreadPoolExecutor, store: HashStore, ranks: range) -> list[Future[str]]:
    return [pool.submit(unique_prefix, store, rank, 3) for rank in ranks]


def names(lives: list[Future[str]]) -> set[str]:
    return {life.result() for life in lives}


def test_each_life_has_a_name_of_its_own() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        first = names(start(pool, store, range(3)))
        again = start(pool, store, range(1, 3))  # rank 0 comes last: the others find the former life's name at first
        second = names(again + start(pool, store, range(1)))
    assert len(first) == len(second) == 1
    assert first != second


def limits_for(ranks: int, hard: int) -> tuple[int, list[str]]:
    """The soft limit of descriptors that so many ranks get, and what is logged."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dalsegno").addHandler(handler)
    allow_descriptors(ranks)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0], logged


def test_a_rank_may_open_as_many_sockets_as_there_are_ranks() -> None:
    """A limit, once lowered, can't be raised again, so each is tried in a process of its own."""
    assert run_ranks(limits_for, 1, 500, 4096) == [(2524, [])]
    [(soft, (warning,))] = run_ranks(limits_for, 1, 16_384, 4096)
    assert soft == 4096
    assert "16384 ranks need about 50176 open files" in warning
