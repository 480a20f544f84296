"""Batches as people have them: ``(x, y)`` with a loss function, rows of lists, columns that the model does not take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

import dalsegno as ds
from dalsegno.data.build import PaddedRows
from dalsegno.testing import run_ranks
from support.listeners import Listener
from support.small import same, small_trainer, weights

GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.randn(20, 4, generator=GENERATOR), torch.randint(0, 3, (20,), generator=GENERATOR)
PAIRS = [*zip(X, Y, strict=True)]
ROWS = [{"x": x, "labels": y} for x, y in PAIRS]
LISTS = [{"x": x.tolist(), "labels": int(y)} for x, y in PAIRS]
WITH_NAMES = [{**row, "name": f"row {index}", "id": index} for index, row in enumerate(ROWS)]


class Classifier(nn.Module):
    """Takes x only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class Masked(Classifier):
    """Has a second argument that is not the target."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is None
        return super().forward(x)


class WithLoss(Classifier):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return {"loss": cross_entropy(self.layer(x), labels)}


def by_name(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(outputs, batch["labels"])


FORMS: dict[str, tuple[type[Classifier], Any, Any]] = {
    "pairs, torch's loss": (Classifier, PAIRS, nn.CrossEntropyLoss()),
    "pairs, torch's function": (Classifier, PAIRS, cross_entropy),
    "pairs, a function": (Classifier, PAIRS, lambda outputs, y: cross_entropy(outputs, y)),
    "pairs, a model with another argument": (Masked, PAIRS, nn.CrossEntropyLoss()),
    "rows of lists": (WithLoss, LISTS, None),
    "columns too many": (WithLoss, WITH_NAMES, None),
    "columns for the loss only": (Classifier, WITH_NAMES, by_name),
}


def trained(output_dir: Path, form: tuple[type[Classifier], Any, Any], *, stop_at: int = 0) -> dict[str, Tensor]:
    kind, data, loss_fn = form
    torch.manual_seed(0)
    stop = Listener({"on_step_end": lambda ctx: ctx.control.stop("enough") if ctx.step == stop_at else None})
    parts = {"train_dataset": data, "loss_fn": loss_fn}
    trainer = small_trainer(output_dir, stop, model=kind(), parts=parts, max_steps=7, learning_rate=0.1)
    assert trainer.train().global_step == (stop_at or 7)
    return weights(trainer)


@pytest.mark.parametrize("name", FORMS)
def test_each_form_trains_the_same_model_and_resumes(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = trained(tmp_path / "plain", (WithLoss, ROWS, None))
    assert same(plain, trained(tmp_path / "straight", FORMS[name]))
    trained(tmp_path / "resumed", FORMS[name], stop_at=3)
    assert same(plain, trained(tmp_path / "resumed", FORMS[name]))
    said = [each for each in caplog.messages if "does not take" in each]
    assert len(said) == (3 if "columns" in name else 0), "once in each process's leg"
    assert all("'name', 'id': not passed to the model" in each for each in said)


def test_rows_of_tokens_are_padded_as_the_tokenizer_does() -> None:
    words = Tokenizer(WordLevel({"[PAD]": 3, "[UNK]": 1}, unk_token="[UNK]"))
    for side in ("left", "right"):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", padding_side=side)
        rows = [{"input_ids": [5, 6, 7], "token_type_ids": [0, 1, 1]}, {"input_ids": [8], "token_type_ids": [1]}]
        theirs = tokenizer.pad(rows, return_tensors="pt")
        labelled = [{**row, "labels": row["input_ids"]} for row in rows]
        for given in (labelled, [{key: torch.tensor(each) for key, each in row.items()} for row in labelled]):
            ours = PaddedRows(tokenizer)(given)
            assert same({**theirs}, {name: ours[name] for name in theirs})
            assert ours["labels"].tolist() == [[5, 6, 7], [-100, -100, 8] if side == "left" else [8, -100, -100]]
    with_mask = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    assert PaddedRows()(with_mask)["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]], "what the mask hides"


ANSWERS: dict[str, tuple[Callable[[], tuple[nn.Module, Any, Any]], str]] = {
    "a mapping for torch's loss": (
        lambda: (Classifier(), ROWS, nn.CrossEntropyLoss()),
        r"CrossEntropyLoss takes \(outputs, target\), and the batch is a mapping of 'x', 'labels'; pass a function",
    ),
    "pairs without a loss function": (
        lambda: (Classifier(), PAIRS, None),
        r"the batch has 2 parts, and Classifier.forward\(\) takes 1; pass loss_fn=",
    ),
    "ragged rows": (
        lambda: (WithLoss(), [{**row, "x": row["x"][: 2 + index % 2]} for index, row in enumerate(LISTS)], None),
        "the column 'x' of a batch's rows cannot be stacked: .* Pass data_collator=",
    ),
    "ragged pairs": (
        lambda: (Classifier(), [(x[: 2 + index % 2], y) for index, (x, y) in enumerate(PAIRS)], cross_entropy),
        "the samples of a batch cannot be stacked: .*; pass data_collator=",
    ),
    "labels of another name": (
        lambda: (Classifier(), [{"x": x, "label": y} for x, y in PAIRS], None),
        r"the model returned a tensor of shape \(4, 3\) and no loss; .*\(it does not take 'label'\)",
    ),
    "no column that fits": (
        lambda: (Classifier(), [{"pixels": x} for x in X], None),
        r"Classifier.forward\(x\) takes none of the batch's columns: 'pixels'; rename them",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_batch_that_does_not_fit_is_answered(tmp_path: Path, name: str) -> None:
    make, text = ANSWERS[name]
    model, data, loss_fn = make()
    with pytest.raises(ds.ConfigurationError, match=text):
        small_trainer(tmp_path, model=model, parts={"train_dataset": data, "loss_fn": loss_fn}, max_steps=1).train()


class Ragged(nn.Module):
    """Returns a tree, and rows as wide as the batch's first sample says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.layer(x)
        wide = logits.repeat(1, 1 + int(labels[0]))
        return {"loss": cross_entropy(logits, labels), "logits": logits, "more": (wide, "a word")}


def predicted(model: nn.Module, output_dir: Path, data: Any, loss_fn: Any = None) -> Any:
    torch.manual_seed(5)
    parts = {"train_dataset": PAIRS, "loss_fn": loss_fn}
    args = {"max_steps": 1, "per_device_eval_batch_size": 3}
    return small_trainer(output_dir, model=model, parts=parts, **args).predict(data, outputs=True)


def test_predict_returns_what_the_model_returns_for_each_sample(tmp_path: Path) -> None:
    model = Classifier()
    found = predicted(model, tmp_path, PAIRS, cross_entropy)
    assert found.keys() >= {"test_loss"} and isinstance(found, dict)
    torch.testing.assert_close(found.outputs, model(X), rtol=1e-5, atol=1e-6)
    several = predicted(model, tmp_path, {"a": PAIRS, "b": PAIRS[:2]}, cross_entropy).outputs
    assert {name: len(each) for name, each in several.items()} == {"a": 20, "b": 2}
    parts = {"train_dataset": PAIRS, "loss_fn": cross_entropy}
    assert small_trainer(tmp_path, model=model, parts=parts).predict(PAIRS).outputs is None
    tree = predicted(Ragged(), tmp_path, ROWS).outputs
    assert tree.keys() == {"logits", "more"} and tree["logits"].shape == (20, 3)
    wide, word = tree["more"]
    assert word is None and [len(row) for row in wide] == [3 * (1 + int(Y[index - index % 3])) for index in range(20)]


def on_two_ranks(output_dir: Path) -> Any:
    torch.manual_seed(0)
    return predicted(Classifier(), output_dir, PAIRS[:7], cross_entropy).outputs.tolist()


def test_predict_returns_the_samples_of_all_ranks_in_order(tmp_path: Path) -> None:
    alone, *ranks = on_two_ranks(tmp_path / "alone"), *run_ranks(on_two_ranks, 2, tmp_path / "ranks")
    for each in ranks:
        torch.testing.assert_close(torch.tensor(each), torch.tensor(alone), rtol=1e-5, atol=1e-6)


class Pairs(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index)), torch.tensor([float(index)])


def test_a_traced_model_takes_a_batch(tmp_path: Path) -> None:
    model = torch.jit.trace(torch.nn.Linear(3, 1), torch.zeros(1, 3))  # type: ignore[no-untyped-call]
    args = ds.TrainingArguments(tmp_path, max_steps=1)
    assert ds.Trainer(model, args, train_dataset=Pairs(), loss_fn=torch.nn.MSELoss()).train().global_step == 1


def test_a_loss_of_ones_own_gets_the_mapping_whatever_it_calls_it(tmp_path: Path) -> None:
    def loss(outputs: Any, target: Any) -> Any:
        return torch.nn.functional.mse_loss(outputs, target["y"])

    class Named(Pairs):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return {"input": x, "y": y}

    args = ds.TrainingArguments(tmp_path, max_steps=1)
    assert ds.Trainer(torch.nn.Linear(3, 1), args, train_dataset=Named(), loss_fn=loss).train().global_step == 1


def test_predicting_nothing(tmp_path: Path) -> None:
    args = ds.TrainingArguments(tmp_path, max_steps=1)
    trainer = ds.Trainer(torch.nn.Linear(3, 1), args, train_dataset=Pairs(), loss_fn=torch.nn.MSELoss())
    assert trainer.predict({}) == {}
    assert trainer.evaluate({}) == {}


class WithMore(torch.nn.Linear):
    """Returns beside its rows what has none: a vector of a fixed length, and a tensor of full batches only."""

    def forward(self, x: Tensor) -> Any:
        rows = super().forward(x)
        return {"rows": rows, "fixed": torch.arange(3.0), "full": rows if len(x) == 3 else None}


def test_outputs_without_a_row_for_each_sample_are_left_out(tmp_path: Path) -> None:
    def loss(outputs: Any, y: Any) -> Tensor:
        return torch.nn.functional.mse_loss(outputs["rows"], y)

    args = ds.TrainingArguments(tmp_path, max_steps=1, per_device_eval_batch_size=5)
    model = WithMore(3, 1)
    outputs = ds.Trainer(model, args, train_dataset=Pairs(), loss_fn=loss).predict(Pairs(), outputs=True).outputs
    with torch.no_grad():
        expected = torch.nn.Linear.forward(model, torch.stack([x for x, _ in (Pairs()[n] for n in range(8))]))
    torch.testing.assert_close(outputs["rows"], expected)
    assert (outputs["full"], outputs["fixed"]) == (None, None)


def test_settings_of_a_derived_class(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Own(ds.TrainingArguments):
        def __post_init__(self) -> None:
            super().__post_init__()
            self._cache = 1

    assert Own(tmp_path, max_steps=1)._cache == 1
