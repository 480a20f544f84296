"""``Mixture``: each dataset has its share, and the rest after any position is that of an uninterrupted pass."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, default_collate

import dalsegno as ds
from dalsegno.data import Mixture
from dalsegno.testing import compare_runs, run_ranks, tiny_regression_data
from support.resumed import stop_after
from support.small import small_trainer

Stop = st.sampled_from(["first_exhausted", "all_exhausted"])
Lengths = st.lists(st.integers(1, 12), min_size=1, max_size=4)


def mixture(lengths: list[int], weights: list[int], seed: int, stop: Any) -> Mixture:
    names = [f"data {number}" for number in range(len(lengths))]
    data = {name: [(name, index) for index in range(length)] for name, length in zip(names, lengths, strict=True)}
    return Mixture(data, dict(zip(names, weights, strict=False)), seed=seed, stopping_strategy=stop)


@settings(deadline=None, max_examples=60)
@given(Lengths, st.lists(st.integers(1, 9), min_size=4, max_size=4), st.integers(0, 9), Stop, st.data())
def test_the_rest_after_any_position_is_the_same(
    lengths: list[int], weights: list[int], seed: int, stop: str, data: st.DataObject
) -> None:
    epoch = data.draw(st.integers(0, 3))
    whole = mixture(lengths, weights, seed, stop)
    whole.set_epoch(epoch)
    samples = list(whole)
    assert samples == list(whole)  # the same epoch again
    at = data.draw(st.integers(0, len(samples)))
    first = mixture(lengths, weights, seed, stop)
    first.set_epoch(epoch)
    iterator = iter(first)
    assert [next(iterator) for _ in range(at)] == samples[:at]
    second = mixture(lengths, weights, seed, stop)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert list(second) == samples[at:]
    second.set_epoch(epoch + 1)
    whole.set_epoch(epoch + 1)
    assert list(second) == list(whole)


@settings(deadline=None, max_examples=40)
@given(Lengths, st.lists(st.integers(1, 9), min_size=4, max_size=4), st.integers(0, 9), Stop, st.integers(2, 4))
def test_parts_of_ranks_are_the_whole_and_datasets_end_as_told(
    lengths: list[int], weights: list[int], seed: int, stop: str, ranks: int
) -> None:
    whole = list(mixture(lengths, weights, seed, stop))
    parts = [list(mixture(lengths, weights, seed, stop).split_by_rank(rank, ranks)) for rank in range(ranks)]
    assert [whole[rank::ranks] for rank in range(ranks)] == parts
    taken = Counter(whole)
    if stop == "first_exhausted":
        assert not taken or max(taken.values()) == 1
    else:
        assert len(taken) == sum(lengths)
        for number, length in enumerate(lengths):
            of_one = [taken[f"data {number}", index] for index in range(length)]
            assert max(of_one) - min(of_one) <= 1


def test_shares_are_the_weights() -> None:
    data = {"web": range(200_000), "code": range(200_000), "books": range(200_000)}
    of_all = Mixture(data, {"web": 7, "code": 2, "books": 1})
    taken = Counter()
    iterator = of_all._samples(1, 1)  # no sample is read: only the plan is followed
    assert next(iterator, None) is None
    taken.update(of_all._taken)
    total = sum(taken.values())
    assert taken["web"] == 200_000
    for name, share in (("web", 0.7), ("code", 0.2), ("books", 0.1)):
        assert taken[name] / total == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / total))


class Noisy(Dataset[dict[str, Any]]):
    """Draws from a generator of its own."""

    def __init__(self, length: int, value: float) -> None:
        self.length, self.value, self.rng = length, value, np.random.default_rng(0)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.sin(torch.arange(8) * (index + self.value)) + self.rng.random()
        return {"x": x, "y": x.sum().reshape(1)}


def in_float32(samples: list[dict[str, Any]]) -> Any:
    return {name: each.float() for name, each in default_collate(samples).items()}


def leg(output_dir: str, stop: int | None, workers: int) -> None:
    data = Mixture({"one": Noisy(17, 1.0), "two": Noisy(5, 2.0)}, {"one": 3, "two": 1}, seed=4)
    small_trainer(
        Path(output_dir),
        *([] if stop is None else [stop_after(stop)]),
        parts={"train_dataset": data, "data_collator": in_float32},
        per_device_train_batch_size=2,
        max_steps=14,
        lr_scheduler_type="constant",
        save_steps=100,
        dataloader_num_workers=workers,
    ).train()


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (1, 2)])
def test_a_run_that_is_interrupted_twice_is_exact(tmp_path: Path, ranks: int, workers: int) -> None:
    run_ranks(leg, ranks, str(tmp_path / "whole"), None, workers)
    for stop in (3, 9, None):
        run_ranks(leg, ranks, str(tmp_path / "parts"), stop, workers)
    comparison = compare_runs(tmp_path / "whole", tmp_path / "parts")
    assert comparison.identical, f"\n{comparison.table()}"


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    run_ranks(leg, 1, str(tmp_path), 3, 0)
    with pytest.raises(ds.RankFailed, match="saved position is in one stream, of which all ranks read the whole, now"):
        run_ranks(leg, 2, str(tmp_path), None, 0)


def trainer_on(output_dir: Path, data: Mixture, *callbacks: ds.Callback) -> ds.Trainer:
    return small_trainer(
        output_dir, *callbacks, parts={"train_dataset": data}, max_steps=4, per_device_train_batch_size=2
    )


WEB, CODE = tiny_regression_data(9, seed=1), tiny_regression_data(5, seed=2)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (Mixture({"web": WEB, "code": CODE}, {"web": 1, "code": 1}, seed=4), "50 % web, 9 samples"),
        (Mixture({"web": WEB, "code": CODE}, {"web": 3, "code": 1}, seed=5), "seed=5"),
        (
            Mixture({"web": WEB, "code": CODE}, {"web": 3, "code": 1}, seed=4, stopping_strategy="all_exhausted"),
            "all_exhausted",
        ),
        (Mixture({"code": CODE, "web": WEB}, {"web": 3, "code": 1}, seed=4), "25 % code, 5 samples; 75 % web"),
        (Mixture({"web": WEB, "text": CODE}, {"web": 3, "text": 1}, seed=4), "25 % text"),
        (Mixture({"web": tiny_regression_data(12, seed=1), "code": CODE}, {"web": 3, "code": 1}, seed=4), "12 samples"),
        (
            Mixture({"web": WEB, "code": tiny_regression_data(5, seed=3)}, {"web": 3, "code": 1}, seed=4),
            "does not fit this Mixture",
        ),
    ],
)
def test_a_resume_on_another_mixture_is_refused_unless_allowed(tmp_path: Path, now: Mixture, said: str) -> None:
    begun = Mixture({"web": WEB, "code": CODE}, {"web": 3, "code": 1}, seed=4)
    trainer_on(tmp_path, begun, stop_after(2)).train()
    with pytest.raises(ds.StateMismatch, match=said):
        trainer_on(tmp_path, now).train()
    assert trainer_on(tmp_path, now).train(allow_changes="dataset").global_step == 4


def test_weights_in_the_same_proportion_are_the_same_mixture(tmp_path: Path) -> None:
    trainer_on(tmp_path, Mixture({"web": WEB, "code": CODE}, {"web": 3, "code": 1}), stop_after(2)).train()
    assert trainer_on(tmp_path, Mixture({"web": WEB, "code": CODE}, {"web": 6, "code": 2})).train().global_step == 4


def test_a_dataset_that_joins_begins_and_the_others_continue(caplog: pytest.LogCaptureFixture) -> None:
    before = Mixture({"a": range(8), "b": range(8)})
    for _ in zip(range(4), before, strict=False):
        pass
    after = Mixture({"a": range(8), "b": range(8), "c": range(100, 108)})
    after.load_state_dict(before.state_dict())
    assert "in a mixture of a, b, now it is of a, b, c" in caplog.text
    assert after.state_dict()["taken"] == {**before.state_dict()["taken"], "c": 0}


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: Mixture({}), "needs datasets by name"),
        (lambda: Mixture({"a": []}), "'a' is empty"),
        (lambda: Mixture({"a": iter([1])}), "'a' is a list_iterator, not a map dataset"),
        (lambda: Mixture({"a": [1]}, {"b": 1}), "unknown Mixture: dataset in weights 'b'"),
        (lambda: Mixture({"a": [1]}, {"a": 0}), "needs a number over 0 for each of a"),
        (lambda: Mixture({"a": [1]}, stopping_strategy="first"), "did you mean 'first_exhausted'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_refused(build: Any, error: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=error):
        build()
