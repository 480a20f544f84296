"""Runs of this trainer, exported: the other program loads them bit by bit, and trains on as the run here does."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dalsegno as ds
from cli.command import dalsegno
from dalsegno.checkpoint import read_tensors
from dalsegno.checkpoint.listing import newest_verified
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.testing import run_ranks

from .other_programs import BATCH, BEGUN, SAMPLES, STEPS, Loop, losses_here, model, one_group, trainer_here
from .test_import_hf import hf_losses, hf_trainer


class AtSix(ds.Callback):
    """Keeps what is in memory after step 6."""

    def on_step_done(self, ctx: Any) -> None:
        if ctx.step == BEGUN:
            self.model = {name: each.clone() for name, each in ctx.model.state_dict().items()}
            self.optimizer = copy.deepcopy(ctx.optimizer.state_dict())
            self.schedule = copy.deepcopy(ctx.lr_scheduler.state_dict())


@dataclass(frozen=True)
class Trained:
    """A run of 26 steps with a checkpoint of step 6."""

    folder: Path
    at_six: AtSix

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"checkpoints/step-{BEGUN:08d}"

    def export(self, target: Path, program: str, **more: Any) -> Path:
        ds.export_checkpoint(self.checkpoint, target, program=program, **more)
        return target

    def check_loaded(self, net: Any, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        """That they are what the run had after step 6, bit by bit."""
        own = net.state_dict()
        assert own.keys() == self.at_six.model.keys()
        assert all(torch.equal(own[name], each) for name, each in self.at_six.model.items())
        there, here = optimizer.state_dict(), self.at_six.optimizer
        assert there["param_groups"] == here["param_groups"]
        assert there["state"].keys() == here["state"].keys()
        for number, kinds in here["state"].items():
            assert all(torch.equal(there["state"][number][kind], value) for kind, value in kinds.items()), number
        assert schedule.state_dict()["last_epoch"] == self.at_six.schedule["last_epoch"] == BEGUN
        assert schedule.get_last_lr() == self.at_six.schedule["_last_lr"]

    def check_losses(self, losses: list[float]) -> None:
        """Those of the 20 steps after the checkpoint."""
        np.testing.assert_allclose(losses, losses_here(self.folder)[BEGUN:], rtol=1e-5)


def train(folder: Path, net: Any, **more: Any) -> Trained:
    trainer = trainer_here(folder, net, save_steps=BEGUN, **more)
    at_six = AtSix()
    trainer.add_callback(at_six)
    trainer.train()
    return Trained(folder, at_six)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """With one group of parameters."""
    net = model()
    optimizer, schedule = one_group(net)
    return train(tmp_path_factory.mktemp("run"), net, optimizer=optimizer, lr_scheduler=schedule)


def test_hf_trains_on(tmp_path: Path) -> None:
    from transformers import EarlyStoppingCallback, TrainerCallback

    trained = train(tmp_path / "run", model())
    place = str(tmp_path / f"out/checkpoint-{BEGUN}")
    done = dalsegno("checkpoints", "export", str(trained.checkpoint), "--to", place, "--program", "hf", folder=tmp_path)
    assert done.returncode == 0, done.stderr

    class Check(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trained.check_loaded(kwargs["model"], kwargs["optimizer"].optimizer, kwargs["lr_scheduler"])
            assert (state.global_step, state.epoch) == (BEGUN, BEGUN * BATCH / SAMPLES)

    evaluates = {"eval_strategy": "steps", "eval_steps": 10, "metric_for_best_model": "loss"}
    trainer = hf_trainer(tmp_path / "out", model(seed=7), save_total_limit=1, optim="adamw_torch", **evaluates)
    trainer.add_callback(Check())
    trainer.add_callback(EarlyStoppingCallback(9))  # whose state each save of theirs looks up
    trainer.train(resume_from_checkpoint=place)
    losses = hf_losses(trainer)[-(STEPS - BEGUN) :]
    np.testing.assert_allclose(losses, losses_here(trained.folder)[BEGUN:], rtol=1e-4)
    assert (tmp_path / f"out/checkpoint-{STEPS}/trainer_state.json").is_file(), "and saves"


def test_a_plain_loop_trains_on_from_a_file_of_torch_save(trained: Trained, tmp_path: Path) -> None:
    content = torch.load(trained.export(tmp_path / "last.pt", "torch"), weights_only=True)
    loop = Loop.new()
    loop.net.load_state_dict(content["model"])
    loop.optimizer.load_state_dict(content["optimizer"])
    loop.schedule.load_state_dict(content["lr_scheduler"])
    trained.check_loaded(loop.net, loop.optimizer, loop.schedule)
    assert (content["step"], content["epoch"]) == (BEGUN, BEGUN * BATCH / SAMPLES)
    trained.check_losses(loop.run(BEGUN, STEPS).losses)


@pytest.mark.parametrize(("program", "name"), [("hf", "Hugging Face Trainer"), ("torch", "torch.save")])
def test_what_is_exported_is_recognized_and_imported_again(
    trained: Trained, tmp_path: Path, program: str, name: str
) -> None:
    source = trained.export(tmp_path / "there", program)
    done = ds.import_checkpoint(source, tmp_path / "back")
    assert (done.run.program, done.run.step) == (name, BEGUN)
    weights = read_tensors(newest_verified(tmp_path / "back"))["model"]
    assert weights.keys() == trained.at_six.model.keys() - {"lm_head.weight"}, "which is tied"
    assert all(torch.equal(each, trained.at_six.model[key]) for key, each in weights.items())


def export_on_rank_zero(checkpoint: Path, target: Path) -> None:
    if dist.get_rank() == 0:
        ds.export_checkpoint(checkpoint, target / "last.pt", program="torch")
        ds.import_checkpoint(target / "last.pt", target / "run", optimizer="torch.optim.AdamW")
    dist.barrier()


def test_one_rank_of_several_exports_and_imports(trained: Trained, tmp_path: Path) -> None:
    run_ranks(export_on_rank_zero, 2, trained.checkpoint, tmp_path)
    assert (tmp_path / f"run/checkpoints/step-{BEGUN:08d}/manifest.json").is_file()


def test_what_cannot_be_exported_is_refused(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean 'torch'"):
        trained.export(tmp_path / "file", "torhc")
    with pytest.raises(UnknownName, match="export program='torch'"):
        trained.export(tmp_path / "file", "lightning")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="exists already"):
        trained.export(tmp_path / "file", "torch")
