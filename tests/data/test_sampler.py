"""The sampler deals each sample of an epoch once, whatever world size and batch size the legs of a run have."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.data import ResumableSampler
from dalsegno.errors import ConfigurationError, EmptyDataset, StateMismatch

sizes = st.integers(1, 9)


def samplers(length: int, batch_size: int, world_size: int, **options: object) -> list[ResumableSampler]:
    return [ResumableSampler(length, batch_size, rank, world_size, **options) for rank in range(world_size)]


@settings(max_examples=150)
@given(
    length=st.integers(1, 120),
    legs=st.lists(st.tuples(sizes, st.integers(1, 4), st.integers(0, 5)), max_size=4),
    last=st.tuples(sizes, st.integers(1, 4)),
    shuffle=st.booleans(),
)
def test_legs_of_any_shape_together_deal_each_sample_once(
    length: int, legs: list[tuple[int, int, int]], last: tuple[int, int], shuffle: bool
) -> None:
    dealt: Counter[int] = Counter()
    state = None
    for batch_size, world_size, stop in [*legs, (*last, None)]:
        ranks = samplers(length, batch_size, world_size, seed=3, shuffle=shuffle)
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
        for number, batches in enumerate(zip(*ranks, strict=True)):
            assert sum(batch.share.samples for batch in batches) == batches[0].share.global_samples
            for batch in batches:
                assert len(batch) == max(batch.share.samples, 1)
                dealt.update(batch[: batch.share.samples])
            assert len({str(sampler.state_dict()) for sampler in ranks}) == 1
            state = ranks[0].state_dict()
            if number + 1 == stop:
                break
        else:
            break
    assert dealt == Counter(range(length))


@settings(max_examples=50)
@given(length=st.integers(1, 400), batch_size=sizes, epoch=st.integers(0, 5), data=st.data())
def test_from_any_cursor_it_goes_on_as_it_would_have(
    length: int, batch_size: int, epoch: int, data: st.DataObject
) -> None:
    whole = ResumableSampler(length, batch_size)
    whole.seek(epoch, 0)
    batches = list(whole)
    skipped = data.draw(st.integers(0, len(batches)))
    resumed = ResumableSampler(length, batch_size)
    resumed.seek(epoch, min(length, skipped * batch_size))
    assert list(resumed) == batches[skipped:]


def test_blocks_leave_no_seam() -> None:
    """Far more than one block of indices, with a batch size that does not divide it."""
    indices = [index for batch in ResumableSampler(30_011, 7) for index in batch]
    assert sorted(indices) == list(range(30_011))
    other_cut = [index for batch in ResumableSampler(30_011, 5000) for index in batch]
    assert indices == other_cut


@settings(max_examples=50)
@given(length=st.integers(1, 100), batch_size=sizes, world_size=st.integers(1, 5))
def test_shares_of_the_last_microbatch_differ_by_at_most_one(length: int, batch_size: int, world_size: int) -> None:
    ranks = samplers(length, batch_size, world_size)
    last = [list(sampler)[-1].share.samples for sampler in ranks]
    assert max(last) - min(last) <= 1
    assert {len(sampler) for sampler in ranks} == {len(list(ranks[0]))}


def test_drop_last_leaves_out_the_incomplete_global_microbatch() -> None:
    for sampler in samplers(23, 4, 2, drop_last=True):
        assert [len(batch) for batch in sampler] == [4, 4]
        assert len(sampler) == 2
        assert sampler.samples == 16


def test_an_exhausted_epoch_is_followed_by_another_order() -> None:
    sampler = ResumableSampler(1000, 8)
    first, second = list(sampler), list(sampler)
    assert sampler.epoch == 2
    assert first != second
    assert sorted(map(sorted, first)) != sorted(map(sorted, second))
    sampler.set_epoch(1)
    assert list(sampler) == second
    assert list(ResumableSampler(1000, 8, seed=1)) != first


def test_set_epoch_keeps_a_resumed_place() -> None:
    sampler = ResumableSampler(100, 10, shuffle=False)
    sampler.seek(3, 50)
    sampler.set_epoch(3)
    assert next(iter(sampler))[0] == 50
    sampler.set_epoch(4)
    assert next(iter(sampler))[0] == 0


def test_ten_billion_rows() -> None:
    sampler = ResumableSampler(10_000_000_000, 8, rank=1, world_size=2, seed=5)
    sampler.seek(2, 9_999_999_990)
    assert [len(batch) for batch in sampler] == [5]
    sampler.seek(0, 4_000_000_000)
    assert next(iter(sampler))[:3] == [
        7330145790,
        9599036345,
        4119716076,
    ]  # golden: seed and epoch become a key for ever


def test_batches_keep_their_place_on_the_way_to_a_worker() -> None:
    sampler = ResumableSampler(100, 10)
    _, second, *_ = sampler
    arrived = pickle.loads(pickle.dumps(second))
    assert (arrived, arrived.key, arrived.share.begin) == (second, second.key, 10)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0, 4), EmptyDataset, "length 0"),
        ((10, 0), ConfigurationError, "batch_size is 0"),
        ((10, 4, 2, 2), ConfigurationError, "rank is 2 of world_size 2"),
        ((7, 4, 0, 2, 0, True, True), EmptyDataset, "7 samples are fewer than one batch of 4 on each of 2 ranks"),
        ((2**63 + 1, 4), ConfigurationError, "at most 2\\*\\*63"),
    ],
)
def test_arguments_that_cannot_work(arguments: tuple[int, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ResumableSampler(*arguments)


def test_a_place_in_other_data_is_refused() -> None:
    state = ResumableSampler(100, 4).state_dict()
    with pytest.raises(StateMismatch, match="dataset of 100 samples, this one has 90"):
        ResumableSampler(90, 4).load_state_dict(state)
    with pytest.raises(StateMismatch, match="shuffle=True, now it is False"):
        ResumableSampler(100, 4, shuffle=False).load_state_dict(state)


def test_the_saved_seed_wins(caplog: pytest.LogCaptureFixture) -> None:
    before, after = ResumableSampler(100, 4, seed=1), ResumableSampler(100, 4, seed=2)
    after.load_state_dict(before.state_dict())
    assert list(after) == list(before)
    assert "keeps its saved seed 1, instead of 2" in caplog.text
