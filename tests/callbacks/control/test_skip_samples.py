"""SkipSamples: the run begins with a later sample, once, whatever the data and the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import dalsegno as ds
from dalsegno.callbacks import SkipSamples
from dalsegno.distributed import collectives
from dalsegno.testing import run_ranks, tiny_regression_data
from support.listeners import Listener
from support.models import Line
from support.resumed import assert_resumes
from support.small import small_trainer

LENGTH = 20


class Numbered(Dataset[Any]):
    """Tiny regression data that say their number, and remember who was asked for."""

    def __init__(self, length: int = LENGTH) -> None:
        self._pairs = tiny_regression_data(length)
        self._length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked.append(index)
        return {**self._pairs[index], "number": index}


class Stream(IterableDataset[Any]):
    """The same, in order, one after the other; nobody knows how many."""

    def __init__(self) -> None:
        self._data = Numbered()

    def __iter__(self) -> Iterator[Any]:
        return (self._data[index] for index in range(LENGTH))


class NumberedLine(Line):
    def forward(self, x: torch.Tensor, y: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y)


class Seen(ds.Callback):
    """The numbers of the samples that were trained on, and when epochs began; over all legs."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.epochs: list[str] = []

    def on_epoch_begin(self, ctx: Any) -> None:
        self.epochs.append(f"begin {ctx.epoch}")

    def on_epoch_end(self, ctx: Any) -> None:
        self.epochs.append(f"end {ctx.epoch}")

    def on_microbatch_end(self, ctx: Any) -> None:
        self.numbers += ctx.batch["number"].tolist()[: ctx.samples]

    def state_dict(self) -> Any:
        return {"numbers": self.numbers, "epochs": self.epochs}

    def load_state_dict(self, state: Any) -> None:
        self.numbers, self.epochs = state["numbers"], state["epochs"]


DATA: dict[str, Callable[[], dict[str, Any]]] = {
    "map": lambda: {"train_dataset": Numbered()},
    "stream": lambda: {"train_dataset": Stream()},
    "loader": lambda: {"train_dataset": None, "train_dataloader": DataLoader(Numbered(), batch_size=4, shuffle=True)},
}


def build(output_dir: Path, *callbacks: ds.Callback, data: str = "map", **settings: Any) -> ds.Trainer:
    given = {"max_steps": 7, "save_steps": 100, **settings}
    return small_trainer(output_dir, *callbacks, model=NumberedLine(), parts=DATA[data](), **given)


def seen(output_dir: Path, skipped: int | None, **how: Any) -> Seen:
    witness = Seen()
    build(output_dir, *([] if skipped is None else [SkipSamples(skipped)]), witness, **how).train()
    return witness


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("skipped", [0, 8, 20, 28, 44])
def test_the_run_is_what_would_have_come_later(tmp_path: Path, data: str, skipped: int) -> None:
    whole = seen(tmp_path / "whole", None, data=data, max_steps=18)
    later = seen(tmp_path / "later", skipped, data=data)
    assert later.numbers == whole.numbers[skipped : skipped + 28]
    assert later.epochs == whole.epochs[: len(later.epochs)]
    assert len(later.epochs) >= skipped // LENGTH * 2 + 1


def test_any_number_of_a_map_dataset_and_none_of_them_is_loaded(tmp_path: Path) -> None:
    whole = seen(tmp_path / "whole", None, max_steps=18)
    data = Numbered()
    at_first = Listener({"on_train_begin": lambda ctx: data.asked.clear()})  # its fingerprint has been taken by then
    small_trainer(
        tmp_path / "later",
        SkipSamples(7),
        at_first,
        model=NumberedLine(),
        parts={"train_dataset": data},
        max_steps=3,
    ).train()
    assert data.asked == whole.numbers[7:19]


def test_whole_micro_batches_of_what_is_read_past(tmp_path: Path) -> None:
    assert seen(tmp_path, 5, data="stream", max_steps=1).numbers == [8, 9, 10, 11]


def test_with_drop_last_all_micro_batches_stay_complete(tmp_path: Path) -> None:
    witness = Seen()
    parts = {"train_dataset": Numbered(18)}
    trainer = small_trainer(
        tmp_path, SkipSamples(5), witness, model=NumberedLine(), parts=parts, dataloader_drop_last=True, max_steps=2
    )
    trainer.train()
    assert len(witness.numbers) == 8
    assert witness.epochs == ["begin 0", "end 0"]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("skipped", [8, 28])
def test_a_resumed_run_does_not_skip_again(tmp_path: Path, data: str, skipped: int) -> None:
    assert_resumes(lambda folder, *own: build(folder, SkipSamples(skipped), Seen(), *own, data=data), tmp_path, 1, 3, 6)


def test_killed_between_two_epochs_that_are_skipped(tmp_path: Path) -> None:
    """A checkpoint at the end of an epoch of which nothing was trained on: what is left to skip is in it."""

    def stop(ctx: Any) -> None:
        ctx.control.stop("between two epochs")

    how: dict[str, Any] = {"save_strategy": "epoch", "save_steps": 500}
    whole = seen(tmp_path / "whole", 28, **how)
    stopper = Listener({"on_epoch_end": stop}, name="stopper")
    first = build(tmp_path / "parts", SkipSamples(28), Seen(), stopper, **how).train()
    assert (first.global_step, first.reason) == (0, "stopped")
    witness = seen(tmp_path / "parts", 28, **how)
    assert witness.numbers == whole.numbers
    assert witness.epochs == whole.epochs


def test_a_run_that_is_under_way_has_no_first_samples(tmp_path: Path) -> None:
    whole = seen(tmp_path / "whole", None, max_steps=12)
    seen(tmp_path / "late", None, max_steps=3)
    late = seen(tmp_path / "late", 8, max_steps=12)
    assert late.numbers == whole.numbers


def on_ranks(output_dir: Path, data: str, skipped: int) -> list[int]:
    batch = 4 // collectives.world_size()
    how: dict[str, Any] = {"per_device_train_batch_size": batch}
    return seen(output_dir, skipped, data=data, parallel="auto", **how).numbers


@pytest.mark.parametrize("data", ["map", "stream"])
@pytest.mark.parametrize("skipped", [8, 24])
def test_two_ranks_skip_what_one_would(tmp_path: Path, data: str, skipped: int) -> None:
    alone = on_ranks(tmp_path / "alone", data, skipped)
    both = run_ranks(on_ranks, 2, tmp_path / "both", data, skipped)
    for step in range(7):
        mine = [numbers[2 * step : 2 * step + 2] for numbers in both]
        assert sorted(mine[0] + mine[1]) == sorted(alone[4 * step : 4 * step + 4])


def test_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    args = ds.TrainingArguments(tmp_path, max_steps=2, save_steps=0, logging_steps=0, use_cpu=True)
    numbers = []
    loader = DataLoader(Numbered(), batch_size=4)
    with ds.Run(args, model=model, optimizer=optimizer, loader=loader, callbacks=[SkipSamples(8)]) as run:
        for batch in run.batches():
            numbers += batch["number"].tolist()
            loss = model(batch["x"], batch["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step_end(loss=loss)
    assert numbers == list(range(8, 16))


@pytest.mark.parametrize("n", [-1, 2.5, True])
def test_wrong_arguments(n: Any) -> None:
    with pytest.raises(ds.ConfigurationError, match=r"n=.*needs an integer of at least 0"):
        SkipSamples(n=n)
