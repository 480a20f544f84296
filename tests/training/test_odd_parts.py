"""Parts of a run that are not as usual: they work, or the error says what is wrong and what to do, before training."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor, AdafactorSchedule

import dalsegno as ds
from dalsegno.callbacks import GradNormLogger, JsonLogger
from dalsegno.errors import ConfigurationError, DamagedRunFile, NotFound, StateMismatch
from dalsegno.logs import RunFile, read_records
from dalsegno.testing import TinyRegression, tiny_regression_data
from support.listeners import Listener
from support.small import small_trainer


def trainer(output_dir: Path, model: nn.Module | None = None, **given: Any) -> ds.Trainer:
    settings = {"max_steps": 4, "logging_steps": 1, "eval_steps": 2, "save_steps": 2, "use_cpu": True}
    names = {"load_best_model_at_end", "max_steps", "max_grad_norm"} & given.keys()
    args = ds.TrainingArguments(output_dir, disable_tqdm=True, **settings | {name: given.pop(name) for name in names})
    data = {"train_dataset": tiny_regression_data(20), "eval_dataset": tiny_regression_data(4, seed=1)}
    return ds.Trainer(model or TinyRegression(), args, **data, **given)


class Words(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(10, 4, sparse=sparse)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.words(x.abs().mul(10).long() % 10).square().mean()


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.01])
def test_sparse_gradients_are_clipped_and_logged_as_dense_ones(tmp_path: Path, max_grad_norm: float) -> None:
    weights, norms = [], []
    for sparse in (False, True):
        model = Words(sparse=sparse)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = tmp_path / str(sparse)
        logs = [JsonLogger(), GradNormLogger()]
        trainer(run, model, optimizer=optimizer, callbacks=logs, max_grad_norm=max_grad_norm).train()
        weights.append(model.words.weight.detach())
        norms.append([each["grad_norm"] for each in read_records(run / "logs" / "train.jsonl") if "grad_norm" in each])
    assert torch.allclose(*weights, rtol=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and len(norms[0]) == 4


def test_a_lazy_module_without_a_shape(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(1))
    with pytest.raises(ConfigurationError, match=r"0\.weight of a lazy module has no shape yet.*call the model on"):
        trainer(tmp_path, model)
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_without_a_learning_rate(tmp_path: Path) -> None:
    model = TinyRegression()
    optimizer = Adafactor(model.parameters())
    with pytest.raises(ConfigurationError, match=r"learning rate of Adafactor is None.*AdafactorSchedule"):
        trainer(tmp_path, model, optimizer=optimizer)
    schedule = AdafactorSchedule(optimizer)
    assert trainer(tmp_path, model, optimizer=optimizer, lr_scheduler=schedule).train().reason == "finished"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_log_whose_name_something_else_has(tmp_path: Path, make: Any) -> None:
    (tmp_path / "logs").mkdir()
    make(tmp_path / "logs" / "train.jsonl")
    with pytest.raises(ConfigurationError, match=r"train\.jsonl: is (a folder|not a regular file); move it away"):
        trainer(tmp_path, callbacks=[JsonLogger()]).train()


def test_a_run_file_that_is_gone_or_damaged(tmp_path: Path) -> None:
    class Vandal(ds.Callback):
        def on_step_end(self, ctx: ds.StepEndContext) -> None:
            RunFile(tmp_path).path.unlink() if ctx.state.global_step == 1 else RunFile(tmp_path).path.write_text("{")

    trainer(tmp_path, callbacks=[Vandal()]).train()
    record = RunFile(tmp_path).load()
    assert record is not None and [(leg.reason, leg.last_step) for leg in record.legs] == [("finished", 4)]
    for damage in ("{", "[]", '{"format": 1, "run_id": "x", "created": 0, "legs": [{"leg": "one"}]}'):
        RunFile(tmp_path).path.write_text(damage)
        with pytest.raises(StateMismatch, match=r"run\.json: damaged") as raised:
            RunFile(tmp_path).load()
        assert isinstance(raised.value, DamagedRunFile)
        assert trainer(tmp_path).train().global_step == 4


class Worsening(TinyRegression):
    """Its loss rises with each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        return 0 * super().forward(x, y) + self.steps


def test_the_best_checkpoint_is_gone(tmp_path: Path) -> None:
    first = trainer(tmp_path, Worsening(), load_best_model_at_end=True)
    first.train()
    assert first.state.best_model_checkpoint == "checkpoints/step-00000002"
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000002")
    with pytest.raises(NotFound, match="load_best_model_at_end=False, which leaves the last weights"):
        trainer(tmp_path, Worsening(), load_best_model_at_end=True).train()
    assert trainer(tmp_path, Worsening(), load_best_model_at_end=False).train().reason == "finished"


def test_a_tensor_in_a_record_is_a_number_or_refused_there(tmp_path: Path) -> None:
    """Not at the end of the run, when its metrics are written down."""
    seen: list[Any] = []
    keep = Listener({"on_log": lambda ctx: seen.append(ctx.logs["own"])}, name="keeper")

    def adding(value: torch.Tensor) -> Listener:
        return Listener({"on_log_step": lambda ctx: ctx.logs.update(own=value)}, name="adder")

    small_trainer(tmp_path / "one", adding(torch.ones(1)), keep, max_steps=2, logging_steps=1).train()
    assert seen == [1.0] * 3 and {type(value) for value in seen} == {float}
    trainer = small_trainer(tmp_path / "three", adding(torch.ones(3)), keep, max_steps=9, logging_steps=1)
    with pytest.raises(ds.CannotSave, match=r"record key 'own': a tensor of shape \(3,\), logged by one of: adder"):
        trainer.train()
    assert trainer.state.global_step == 1

    late = Listener({"on_log": lambda ctx: ctx.logs.update(own=torch.ones(3))}, name="late")
    trainer = small_trainer(tmp_path / "late", late, max_steps=9, logging_steps=1)
    with pytest.raises(ds.CannotSave, match=r"record key 'own': a tensor of shape \(3,\), logged by one of: late"):
        trainer.train()
    assert trainer.state.global_step == 1
