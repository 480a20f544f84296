"""Sequences are cut in training, to a length that grows at given steps."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.data.cut_batches import shortened
from dalsegno.testing import DataOrder, FaultPlan, TinyLanguageModel, assert_resume_equivalent, run_ranks
from support.listeners import Listener
from support.small import arguments

GROWING = {0: 4, 2: 9, 4: 100}
OF_EACH_STEP = [4, 4, 9, 9, 12, 12]


class Tokens(Dataset[dict[str, Tensor]]):
    """``count`` sequences of twelve tokens, some of them without a label; the row's number does not depend on it."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(0, 256, (count, 12), generator=generator)
        self._labels = self._ids.where(torch.rand((count, 12), generator=generator) < 0.7, -100)
        self._labels[:, 0] = 7

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index], "labels": self._labels[index]}


def labels_of(batch: dict[str, Tensor]) -> float:
    return float((batch["labels"] != -100).sum())


def language_trainer(output_dir: Path, *callbacks: ds.Callback, dropout: float = 0.1, **settings: Any) -> ds.Trainer:
    """The loss is the mean over the labels; two micro-batches a step."""
    torch.manual_seed(0)
    usual = {"max_steps": 6, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "disable_tqdm": True}
    return ds.Trainer(
        TinyLanguageModel(width=8, depth=1, heads=2, context=12, dropout=dropout),
        arguments(output_dir, **{"sequence_length_schedule": GROWING, **usual, **settings}),
        train_dataset=Tokens(18),
        eval_dataset=Tokens(4),
        loss_weight=labels_of,
        callbacks=callbacks,
    )


def saving_trainer(output_dir: Path) -> ds.Trainer:
    return language_trainer(output_dir, JsonLogger(), DataOrder(), save_steps=1, logging_steps=1)


def test_a_killed_run_resumes_exactly_before_and_after_a_change(tmp_path: Path) -> None:
    kills = [
        FaultPlan(event=ds.Event.BEFORE_FORWARD, count=6),
        FaultPlan(event=ds.Event.STEP_END, count=4),
    ]
    assert_resume_equivalent(saving_trainer, kill_at=kills, folder=tmp_path)


def test_each_step_is_trained_on_its_own_length(tmp_path: Path) -> None:
    """Against a plain loop over the whole batches, cut by hand: losses to the bit, tokens as cut, evaluation uncut."""
    shapes: list[tuple[int, ...]] = []
    evaluated: list[tuple[int, ...]] = []
    losses: list[float] = []
    notes = Listener(
        {
            "on_microbatch_begin": lambda ctx: shapes.append(tuple(ctx.batch["input_ids"].shape)),
            "on_prediction_step": lambda ctx: evaluated.append(tuple(ctx.batch["input_ids"].shape)),
            "on_step_end": lambda ctx: losses.append(ctx.loss),
        }
    )
    settings = {"lr_scheduler_type": "constant", "max_grad_norm": 0, "max_steps": 4, "eval_steps": 3}
    settings |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}
    trainer = language_trainer(tmp_path, notes, dropout=0.0, **settings)
    trainer.train()

    whole: list[dict[str, Tensor]] = []
    keep = Listener({"on_microbatch_begin": lambda ctx: whole.append(ctx.batch)})
    uncut = language_trainer(tmp_path / "whole", keep, dropout=0.0, sequence_length_schedule=None, **settings)
    model = TinyLanguageModel(width=8, depth=1, heads=2, context=12, dropout=0.0)
    model.load_state_dict(uncut.model.state_dict())
    uncut.train()
    decay = (
        [each for each in model.parameters() if each.ndim > 1],
        [each for each in model.parameters() if each.ndim < 2],
    )
    optimizer = AdamW([{"params": each} for each in decay], lr=0.01, weight_decay=0.0)
    by_hand = []
    for length, batch in zip(OF_EACH_STEP, whole, strict=False):
        loss = model(batch["input_ids"][:, :length], batch["labels"][:, :length])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        by_hand.append(loss.item())
    assert losses == pytest.approx(by_hand, rel=1e-6)
    assert shapes == [(4, length) for length in OF_EACH_STEP[:4]]
    assert evaluated == [(4, 12)]
    assert trainer.state.num_input_tokens_seen == 4 * sum(OF_EACH_STEP[:4])


def train_ranked(output_dir: Path, batch_size: int) -> tuple[dict[int, float], set[int], int]:
    """The loss of each step, the lengths of this rank's batches, and the number of tokens on all ranks."""
    losses: dict[int, float] = {}
    lengths: set[int] = set()
    notes = Listener(
        {
            "on_train_metrics": lambda ctx: losses.update({ctx.state.global_step: ctx.metrics["loss"]}),
            "on_microbatch_begin": lambda ctx: lengths.add(ctx.batch["input_ids"].shape[1]),
        }
    )
    settings: dict[str, Any] = {"per_device_train_batch_size": batch_size, "dropout": 0.0, "max_steps": 4}
    trainer = language_trainer(output_dir, notes, logging_steps=1, **settings)
    trainer.train()
    return losses, lengths, trainer.state.num_input_tokens_seen


def test_two_ranks_weigh_the_labels_that_are_left(tmp_path: Path) -> None:
    ((alone, _, tokens),) = run_ranks(train_ranked, 1, tmp_path / "one", 4)
    for losses, lengths, tokens_of_both in run_ranks(train_ranked, 2, tmp_path / "two", 2):
        assert losses == pytest.approx(alone, rel=1e-4)
        assert lengths == {4, 9}
        assert tokens_of_both == tokens


def test_a_loop_of_the_users_own(tmp_path: Path) -> None:
    model = TinyLanguageModel(width=8, depth=1, heads=2, context=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    args = arguments(tmp_path, max_steps=6, sequence_length_schedule=GROWING, disable_tqdm=True)
    lengths = []
    with ds.Run(args, model=model, optimizer=optimizer, loader=DataLoader(Tokens(24), batch_size=4)) as run:
        for batch in run.batches():
            lengths.append(batch["input_ids"].shape[1])
            model(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step_end(loss=0.0)
    assert lengths == OF_EACH_STEP


def test_what_is_cut(tmp_path: Path) -> None:
    """Tensors of the shape of the tokens; the class of the batch stays, and the batch itself is not changed."""
    ids = torch.arange(12).reshape(2, 6)
    batch = UserDict({"input_ids": ids, "position_ids": ids, "weight": torch.ones(2), "names": ["a", "b"]})
    cut = shortened(batch, 4)
    assert isinstance(cut, UserDict)
    assert cut["input_ids"].tolist() == cut["position_ids"].tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert cut["input_ids"].is_contiguous()
    assert cut["weight"] is batch["weight"]
    assert cut["names"] == ["a", "b"]
    assert batch["input_ids"] is ids
    assert shortened(batch, 6) is batch


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([torch.zeros(2, 6)], "the batch is a list; needs batches with input_ids"),
        ({"x": torch.zeros(2, 6)}, "the batch contains x; needs batches with input_ids"),
        ({"input_ids": torch.zeros(6)}, r"input_ids has shape \(6,\); needs batches"),
        (
            {"input_ids": torch.zeros(2, 6), "attention_mask": torch.zeros(2, 1, 6, 6)},
            r"attention_mask has shape \(2, 1, 6, 6\), and input_ids \(2, 6\); only tensors of the same shape",
        ),
    ],
)
def test_what_cannot_be_cut(batch: Any, message: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=f"sequence_length_schedule: {message}"):
        shortened(batch, 4)


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match=r"sequence_length_schedule=\{5: 512\}: needs integers"):
        ds.TrainingArguments(tmp_path, sequence_length_schedule={5: 512})
    with pytest.raises(ds.ConfigurationError, match="and torch_compile=True: compiled kernels depend on the lengths"):
        ds.TrainingArguments(tmp_path, sequence_length_schedule={0: 512}, torch_compile=True)
