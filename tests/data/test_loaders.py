"""What a feed hands out: true counts on every rank, nothing drawn from the global generators, errors that help."""

from __future__ import annotations

import copy
import random
from collections import Counter, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from dalsegno.data import (
    Microbatch,
    ResumableLoader,
    eval_loader,
    resumable_eval_loader,
    resumable_loader,
    sample_count,
    train_loader,
)
from dalsegno.errors import ConfigurationError, EmptyDataset, StateMismatch
from dalsegno.stateful.component import Component


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


class StatefulStream(Stream):
    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class StatefulMap(list[int]):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Seeded(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int, seed: int = 0) -> torch.Tensor:
        return torch.tensor([index, seed])


KINDS: dict[str, Callable[[int], Any]] = {
    "map": lambda length: list(range(length)),
    "map with a state": lambda length: StatefulMap(range(length)),
    "stream": Stream,
    "stream with a state": StatefulStream,
}


def feeds(source: Callable[[], Any], batch_size: int, world_size: int, **options: Any) -> list[ResumableLoader]:
    return [
        train_loader(source(), batch_size=batch_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def values(microbatch: Microbatch) -> list[int]:
    """The true samples of a micro-batch: those that are padding come last."""
    return microbatch.batch.tolist()[: microbatch.samples]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(
    length=st.integers(1, 30),
    batch_size=st.integers(1, 4),
    world_size=st.integers(1, 4),
    drop_last=st.booleans(),
)
@example(length=17, batch_size=3, world_size=2, drop_last=True)
def test_the_ranks_end_together_and_share_each_sample_once(
    kind: str, length: int, batch_size: int, world_size: int, drop_last: bool
) -> None:
    ranks = feeds(lambda: KINDS[kind](length), batch_size, world_size, drop_last=drop_last and length >= 16)
    assert all(feed.lockstep for feed in ranks)
    dealt: Counter[int] = Counter()
    for microbatches in zip(*ranks, strict=True):
        assert {m.global_samples for m in microbatches} == {sum(m.samples for m in microbatches)}
        dealt.update(value for m in microbatches for value in values(m))
        assert len({feed.position for feed in ranks}) == 1
    assert {feed.samples_per_epoch() for feed in ranks if feed.samples_per_epoch()} <= {dealt.total()}
    assert set(dealt.values()) == {1}
    assert dealt.total() == (length - length % (batch_size * world_size) if drop_last and length >= 16 else length)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(length=st.integers(1, 30), skipped=st.integers(0, 35), world_size=st.integers(1, 3), resumes=st.booleans())
@example(length=17, skipped=17, world_size=2, resumes=True)
def test_skipping_leaves_what_comes_later(kind: str, length: int, skipped: int, world_size: int, resumes: bool) -> None:
    whole = [value for m in feeds(lambda: KINDS[kind](length), 3 * world_size, 1)[0] for value in values(m)]
    ranks = feeds(lambda: KINDS[kind](length), 3, world_size)
    (passed,) = {feed.skip(skipped) for feed in ranks}
    assert passed == (
        min(skipped, length) if kind == "map" else min(-(-skipped // (3 * world_size)) * 3 * world_size, length)
    )
    if resumes:
        states = [feed.state_dict() for feed in ranks]
        ranks = feeds(lambda: KINDS[kind](length), 3, world_size)
        for feed, state in zip(ranks, states, strict=True):
            feed.load_state_dict(state)
    assert all(feed.started == (passed > 0) for feed in ranks)
    rest = [value for feed in ranks for m in feed for value in values(m)]
    assert sorted(rest) == sorted(whole[passed:])


@pytest.mark.parametrize("kind", ["map", "stream", "stream with a state"])
@pytest.mark.parametrize(("before", "after"), [((3, 1), (3, 2)), ((3, 2), (3, 1)), ((2, 3), (1, 2)), ((2, 2), (4, 1))])
def test_the_number_of_ranks_changes_in_mid_epoch(kind: str, before: tuple[int, int], after: tuple[int, int]) -> None:
    old = feeds(lambda: KINDS[kind](31), *before)
    dealt: Counter[int] = Counter()
    for number, microbatches in enumerate(zip(*old, strict=True)):
        dealt.update(value for m in microbatches for value in values(m))
        if number == 1:
            break
    states = [copy.deepcopy(feed.state_dict()) for feed in old]
    new = feeds(lambda: KINDS[kind](31), *after)
    component = Component("loader", new[0])
    if component.scope == "replicated":
        assert all(state == states[0] for state in states)
        states = [states[0]] * len(new)
    elif len(new) != len(old):
        states = component.reshard(states, len(new))
    for feed, state in zip(new, states, strict=True):
        feed.load_state_dict(state)
    for microbatches in zip(*new, strict=True):
        dealt.update(value for m in microbatches for value in values(m))
    assert dealt == Counter(range(31))


def test_a_position_that_the_new_batches_do_not_divide() -> None:
    old, new = train_loader(Stream(31), batch_size=3), train_loader(Stream(31), batch_size=2)
    next(iter(old))
    new.load_state_dict(old.state_dict())
    with pytest.raises(StateMismatch, match="3 samples into the epoch, and reading again stops at 4"):
        next(iter(new))


def test_nothing_is_drawn_from_the_global_generators() -> None:
    before = (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist())
    for kind in KINDS.values():
        feed = train_loader(kind(10), batch_size=3)
        list(feed)
        feed.next_epoch()
        next(iter(feed))
        list(eval_loader(kind(10), batch_size=3))
    list(resumable_eval_loader(DataLoader(list(range(5)))))
    assert before == (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist())


def test_a_sample_seed_depends_on_seed_epoch_and_index_alone() -> None:
    def seeds(epoch: int = 0, **options: Any) -> dict[int, int]:
        feed = train_loader(Seeded(), **{"batch_size": 3, "seed": 7, **options})
        for _ in range(epoch):
            feed.next_epoch()
        return {index: seed for m in feed for index, seed in m.batch.tolist()}

    usual = seeds()
    assert len(set(usual.values())) == 20
    assert seeds(batch_size=7) == seeds(shuffle=False) == seeds(num_workers=2) == usual
    assert not set(usual.values()) & set(seeds(epoch=1).values())
    assert not set(usual.values()) & set(seeds(seed=8).values())
    assert usual[3] == 8335327592828342272  # golden: a dataset made from seeds must stay the same


def test_workers_come_and_go() -> None:
    """The order does not depend on them, nor does the place."""
    whole = [values(m) for m in train_loader(list(range(40)), batch_size=3)]
    seen, state = [], None
    for num_workers in (2, 0, 3):
        feed = train_loader(list(range(40)), batch_size=3, num_workers=num_workers)
        if state:
            feed.load_state_dict(state)
        for number, microbatch in enumerate(feed):
            seen.append(values(microbatch))
            if number == 3:
                break
        state = feed.state_dict()
    assert seen == whole[: len(seen)]


def test_other_worker_counts_are_refused_where_the_place_depends_on_them() -> None:
    for kind in ("map with a state", "stream", "stream with a state"):
        old = train_loader(KINDS[kind](40), batch_size=3, num_workers=2)
        next(iter(old))
        new = train_loader(KINDS[kind](40), batch_size=3, num_workers=1)
        with pytest.raises(StateMismatch, match=r"number of worker processes \(now 1\)|\[2, 3\], now it is \[1, 3\]"):
            new.load_state_dict(old.state_dict())
            next(iter(new))
        old.close()


def test_closing_ends_the_workers_and_keeps_the_place() -> None:
    feed = train_loader(list(range(40)), batch_size=3, num_workers=2, persistent_workers=True)
    whole = [values(m) for m in train_loader(list(range(40)), batch_size=3)]
    assert values(next(iter(feed))) == whole[0]
    feed.close()
    assert torch.multiprocessing.active_children() == []
    assert [values(m) for m in feed] == whole[1:]


def test_evaluation_begins_at_the_first_sample_each_time() -> None:
    for kind in KINDS.values():
        feed = eval_loader(kind(10), batch_size=4, rank=1, world_size=2)
        once = [(m.batch.tolist(), m.samples, m.global_samples) for m in feed]
        next(iter(feed))
        assert [(m.batch.tolist(), m.samples, m.global_samples) for m in feed] == once
        assert [samples for _, samples, _ in once] == [4, 1]
        with feed.evaluated() as loader:
            assert loader.lockstep
    own = resumable_eval_loader(DataLoader(list(range(5)), 2))
    assert [m.samples for m in own] == [m.samples for m in own] == [2, 2, 1]
    assert own.length() == 3


class Drawing(list[int]):
    def __init__(self, length: int, generator: random.Random) -> None:
        super().__init__(range(length))
        self.generator = generator

    def __getitem__(self, index: Any) -> Any:
        return index + self.generator.random()


def test_evaluation_draws_the_same_each_time_and_takes_nothing_from_training() -> None:
    shared = random.Random(3)
    for feed in (
        eval_loader(Drawing(10, shared), batch_size=4),
        resumable_eval_loader(DataLoader(Drawing(10, shared), 4)),  # type: ignore[arg-type]
    ):
        shared.random()
        before = shared.getstate()
        once = [m.batch.tolist() for m in feed]
        feed.close()
        assert shared.getstate() == before
        next(iter(feed))
        assert [m.batch.tolist() for m in feed] == once
        feed.close()
        assert shared.getstate() == before


def test_a_generator_is_good_for_one_epoch() -> None:
    feed = train_loader((i for i in range(7)), batch_size=3)
    assert [values(m) for m in feed] == [[0, 1, 2], [3, 4, 5], [6]]
    assert feed.microbatches_per_epoch() is None
    feed.next_epoch()
    assert list(feed) == []


def test_reading_again_says_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    old, new = train_loader(Stream(31), batch_size=3), train_loader(Stream(31), batch_size=3)
    for _, _ in zip(range(4), old, strict=False):
        pass
    new.load_state_dict(old.state_dict())
    next(iter(new))
    assert "Stream has no state_dict: reading 4 micro-batches (12 samples) again" in caplog.text
    assert "reading again took" in caplog.text


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(5, 2), 5),
        ({"text": ["a", "b"], "ids": [torch.zeros(3, 1), torch.zeros(4)]}, 3),
        (("name", torch.zeros(4)), 4),
        (torch.tensor(1.0), 1),
        (["a", "b", "c"], 3),
        ("abc", 3),
        (UserList([torch.zeros(6, 2), torch.zeros(6)]), 6),
        (deque([torch.zeros(6, 2)]), 6),
        (7, 1),
    ],
)
def test_the_number_of_samples_in_a_batch(batch: Any, count: int) -> None:
    assert sample_count(batch) == count


def test_a_batch_of_own_kind_is_counted_by_its_tensor() -> None:
    feed = resumable_loader(DataLoader(TensorDataset(torch.arange(5)), 2), world_size=2)
    assert [(m.samples, m.global_samples) for m in feed] == [(2, None), (2, None), (1, None)]
    assert not feed.lockstep


def replayed(length: int) -> ResumableLoader:
    return resumable_loader(DataLoader(list(range(length)), 2), world_size=1)


def test_places_that_do_not_fit() -> None:
    of_map, of_stream = train_loader(list(range(9)), batch_size=2), train_loader(StatefulStream(9), batch_size=2)
    next(iter(of_stream))
    with pytest.raises(StateMismatch, match="in a map dataset, but now the data is a dataset or loader with its own"):
        of_stream.load_state_dict(of_map.state_dict())
    with pytest.raises(StateMismatch, match="with its own state_dict, but now the data is a map dataset"):
        of_map.load_state_dict(of_stream.state_dict())
    long, short = replayed(9), replayed(4)
    for _ in long:
        if long.position > 0.7:
            break
    short.load_state_dict(long.state_dict())
    with pytest.raises(StateMismatch, match="4 micro-batches into the epoch, and reading again stops at 2"):
        next(iter(short))
    with pytest.raises(StateMismatch, match="saved by 2 ranks, now there are 1, and only your loader or dataset knows"):
        Component("loader", long).reshard([long.state_dict()] * 2, 1)


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


class Table(dict[str, list[int]]):
    """Of columns; a number gives a row, as in a TensorDict."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else {name: self[name][key] for name in self}


def test_a_mapping_with_rows_is_a_dataset() -> None:
    loader = train_loader(Table(x=[1, 2, 3]), batch_size=3)
    assert sorted(next(iter(loader)).batch["x"].tolist()) == [1, 2, 3]
    with pytest.raises(ConfigurationError, match="a UserDict of 'x' is not a dataset"):
        train_loader(UserDict(x=[1, 2, 3]), batch_size=3)


def test_data_that_cannot_work() -> None:
    with pytest.raises(EmptyDataset, match="length 0"):
        train_loader([], batch_size=2)
    with pytest.raises(EmptyDataset, match="length 0"):
        eval_loader([], batch_size=2)
    with pytest.raises(EmptyDataset, match="the loader has length 0"):
        resumable_loader(StatefulDataLoader([], 2))
    with pytest.raises(ConfigurationError, match="NoLength has __getitem__ but no length"):
        train_loader(NoLength(), batch_size=2)
    with pytest.raises(ConfigurationError, match="a int is not a dataset: it needs"):
        train_loader(3, batch_size=2)
    with pytest.raises(ConfigurationError, match="a int is not a loader"):
        resumable_loader(3)  # type: ignore[arg-type]
