"""Loaders of the user's own that give one rank fewer batches than another, broken off where only one is through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

import dalsegno as ds
from dalsegno.distributed import collectives
from dalsegno.errors import RankFailed
from dalsegno.testing import TinyRegression, compare_runs, run_ranks, tiny_regression_data
from support.resumed import stop_after
from support.small import arguments

SHARES = [range(7), range(7, 22)]
"""Two batches for rank 0, the second one smaller; four for rank 1."""


class Stream(IterableDataset[Any]):
    """Of unknown length; resumes after the sample of its saved state."""

    def __init__(self) -> None:
        self.start = self.at = 0

    def __iter__(self) -> Iterator[Any]:
        data, share = tiny_regression_data(22), SHARES[collectives.rank()]
        start, self.start = self.start, 0
        for self.at in range(start + 1, len(share) + 1):
            yield data[share[self.at - 1]]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.at = state["at"]


def odd(samples: list[Any]) -> Any:
    return {**torch.utils.data.default_collate(samples), "about": object()}


class Forgiving(TinyRegression):
    def forward(self, x: torch.Tensor, y: torch.Tensor, about: object = None) -> torch.Tensor:
        return super().forward(x, y)


def train(output_dir: Path, loader: type[DataLoader[Any]], stream: bool, collate: Any, stops: tuple[int, ...]) -> Any:
    for stop in stops:
        torch.manual_seed(0)
        data = Stream() if stream else Subset(tiny_regression_data(22), SHARES[collectives.rank()])
        args = arguments(output_dir, num_train_epochs=2, save_steps=100, lr_scheduler_type="constant")
        own = loader(data, 4, collate_fn=collate)
        trainer = ds.Trainer(Forgiving(), args, train_dataloader=own, callbacks=[stop_after(stop)])
        step = trainer.train().global_step
    return step


@pytest.mark.parametrize("stream", [False, True], ids=["length known", "length unknown"])
@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
def test_a_rank_that_is_through_waits_on_after_a_resume(
    tmp_path: Path, loader: type[DataLoader[Any]], stream: bool
) -> None:
    """Rank 0 is through with the epochs after steps 2 and 6; without a length it notices one step later."""
    assert run_ranks(train, 2, tmp_path / "whole", loader, stream, None, (9,)) == [8, 8]
    stops = (1, 3, 7, 9) if stream and loader is StatefulDataLoader else (1, 3, 6, 7, 9)
    assert run_ranks(train, 2, tmp_path / "parts", loader, stream, None, stops) == [8, 8]
    comparison = compare_runs(tmp_path / "whole", tmp_path / "parts")
    assert comparison.identical, f"\n{comparison.table()}"


REFUSED = r"rank \[0\] had finished the epoch when the checkpoint was saved, .* resume from another checkpoint"


def test_where_it_has_not_noticed_yet_the_resume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=REFUSED):
        run_ranks(train, 2, tmp_path, StatefulDataLoader, True, None, (2, 9))


def test_where_its_batch_cannot_be_saved_the_resume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=REFUSED):
        run_ranks(train, 2, tmp_path, DataLoader, False, odd, (3, 9))
