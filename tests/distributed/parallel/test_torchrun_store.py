"""Ranks that are started again find each other, and not what the former ones have left in torchrun's store."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from torch.distributed import HashStore

from dalsegno.distributed.parallel.torchrun import unique_prefix


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
