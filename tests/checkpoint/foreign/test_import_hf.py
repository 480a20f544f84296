"""A run of Hugging Face's Trainer, imported and continued here."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, Subset

import dalsegno as ds
from cli.command import dalsegno
from dalsegno.checkpoint.foreign.programs import import_checkpoint
from dalsegno.errors import ConfigurationError, DamagedCheckpoint, StateMismatch
from dalsegno.testing import run_ranks

from .other_programs import BATCH, BEGUN, STEPS, Sentences, losses_here, model, trainer_here
from .touch import Touch

PICKLES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


def hf_trainer(folder: Path, net: Any, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        str(folder),
        **{
            "max_steps": STEPS,
            "save_steps": BEGUN,
            "logging_steps": 1,
            "learning_rate": 0.01,
            "weight_decay": 0.1,
            "per_device_train_batch_size": BATCH,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            **more,
        },
    )
    return InOrder(net, arguments, train_dataset=Sentences(), eval_dataset=Subset(Sentences(), range(4)))


def hf_losses(trainer: Any) -> list[float]:
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], dict[str, Any]]:
    """Folder of an HF run; its losses; its weights at the end."""
    folder = tmp_path_factory.mktemp("hf")
    trainer = hf_trainer(folder, model())
    trainer.train()
    return folder, hf_losses(trainer), {name: each.clone() for name, each in trainer.model.state_dict().items()}


@pytest.fixture(scope="module")
def imported(begun: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Imported by the command."""
    folder = tmp_path_factory.mktemp("imported") / "run"
    done = dalsegno("checkpoints", "import", f"checkpoint-{BEGUN}", "-o", str(folder), "--json", folder=begun[0])
    assert done.returncode == 0, done.stderr
    parts = {row["part"]: row for row in json.loads(done.stdout)["parts"]}
    taken = {part for part, row in parts.items() if row["taken"] == "yes"}
    assert taken == {"model", "optimizer", "learning rate schedule", "place in the data"}
    never = {"random generators", "gradient scaler", "log", "settings"}
    assert parts.keys() - taken == {*never, "callback TrainerControl", "order of the data"}
    return folder


@pytest.fixture
def run(imported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(imported, tmp_path / "run"))


def test_the_next_steps_here_are_those_that_hf_would_have_taken(begun: Any, run: Path) -> None:
    _, theirs, final = begun
    net = model(seed=7)
    result = trainer_here(run, net).train()
    assert result.global_step == STEPS
    ours = losses_here(run)
    assert len(ours) == STEPS - BEGUN
    np.testing.assert_allclose(ours, theirs[BEGUN:], rtol=1e-4)
    for name, each in net.state_dict().items():
        torch.testing.assert_close(each, final[name], rtol=1e-3, atol=1e-5)


def test_every_part_is_what_hf_saved(begun: Any, run: Path) -> None:
    folder = begun[0] / f"checkpoint-{BEGUN}"
    trainer = trainer_here(run, model(seed=7))
    loaded = Loaded()
    trainer.add_callback(loaded)
    trainer.train()
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    assert loaded.optimizer["param_groups"] == saved["param_groups"]
    for number, kinds in saved["state"].items():
        for kind, value in kinds.items():
            assert torch.equal(loaded.optimizer["state"][number][kind], value), (number, kind)
    schedule = torch.load(folder / "scheduler.pt", weights_only=True)
    assert loaded.scheduler["last_epoch"] == schedule["last_epoch"] == BEGUN
    assert loaded.scheduler["_last_lr"] == schedule["_last_lr"]
    assert (loaded.step, loaded.epoch, loaded.samples) == (BEGUN, BEGUN * BATCH / len(Sentences()), BEGUN * BATCH)


class Loaded(ds.Callback):
    """What is there before the first step; ends the leg then."""

    def on_load(self, ctx: Any) -> None:
        self.optimizer = copy.deepcopy(ctx.optimizer.state_dict())
        self.scheduler = dict(ctx.lr_scheduler.state_dict())
        self.drawn = torch.rand(4)
        self.step, self.epoch, self.samples = ctx.state.global_step, ctx.state.epoch, ctx.state.samples_seen
        self.notes = list(ctx.report.notes)

    def on_step_end(self, ctx: Any) -> None:
        ctx.control.stop("seen", save=False)


def test_a_map_dataset_continues_at_the_same_number_of_samples_and_says_so(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_here(run, model(seed=7), train_dataset=Sentences())
    loaded = Loaded()
    trainer.add_callback(loaded)
    trainer.train()
    assert trainer.state.samples_seen == (BEGUN + 1) * BATCH
    message = f"continues at sample {BEGUN * BATCH} of epoch 0, in this run's own order"
    assert any(message in note for note in loaded.notes)
    assert any(message in each.getMessage() for each in caplog.records if each.levelname == "WARNING")


def test_the_generators_are_seeded_by_the_arguments(run: Path, tmp_path: Path) -> None:
    drawn = []
    for number, seed in enumerate((1, 1, 2)):
        torch.seed()
        loaded = Loaded()
        trainer = trainer_here(Path(shutil.copytree(run, tmp_path / f"run-{number}")), model(seed=7), seed=seed)
        trainer.add_callback(loaded)
        torch.seed()
        trainer.train()
        drawn.append(loaded.drawn)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_another_order_of_parameters_is_refused(run: Path) -> None:
    net = model(seed=7)
    groups = [[each for each in net.parameters() if (each.ndim < 2) is small] for small in (False, True)]
    groups[0].reverse()
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.01)
    with pytest.raises(
        StateMismatch, match=r"group\[0\].params\[0\]: saved for a parameter of \[40, 16\], here it has"
    ):
        trainer_here(run, net, optimizer=optimizer).train()
    one = torch.optim.AdamW(net.parameters(), lr=0.01)
    with pytest.raises(StateMismatch, match="2 parameter groups in the checkpoint, 1 here"):
        trainer_here(run, net, optimizer=one).train()


def test_another_schedule_is_said(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_here(run, model(seed=7), lr_scheduler_type="cosine")
    trainer.add_callback(Loaded())
    trainer.train()
    was, now = 0.01 * (1 - BEGUN / STEPS), 0.005 * (1 + np.cos(np.pi * BEGUN / STEPS))
    assert f"learning rate: was {was:g}, is {now:g} in the schedule here" in caplog.text


def of_two_ranks(run: Path) -> list[float]:
    """Train on, each rank with every other sample."""
    data = Sentences()
    loader = DataLoader(data, batch_size=1, sampler=DistributedSampler(data, shuffle=False))
    trainer_here(run, model(seed=7), train_dataloader=loader, parallel="fsdp").train()
    return losses_here(run)


def test_two_ranks_with_fsdp_go_on_from_the_run_of_one(begun: Any, run: Path) -> None:
    losses, _ = run_ranks(of_two_ranks, 2, run)
    np.testing.assert_allclose(losses, begun[1][BEGUN:], rtol=1e-4)


def test_the_optimizer_is_needed_to_resume_and_the_weights_are_not_lost(begun: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(begun[0] / f"checkpoint-{BEGUN}", tmp_path / "checkpoint-6"))
    for name in PICKLES:
        (folder / name).unlink()
    done = import_checkpoint(folder, tmp_path / "run")
    assert not done.can_resume and "save_only_model" in done.run.left_out["optimizer"]
    with pytest.raises(DamagedCheckpoint, match=r"load_components=\(\"model\",\)"):
        trainer_here(tmp_path / "run", model(seed=7)).train()
    net = model(seed=7)
    trainer = trainer_here(tmp_path / "new", net)
    trainer.add_callback(Loaded())
    trainer.train(str(done.checkpoint), load_components=("model",))
    assert trainer.state.global_step == 1


def test_code_is_refused_in_words_and_nothing_is_written(begun: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(begun[0] / f"checkpoint-{BEGUN}", tmp_path / "checkpoint-6"))
    torch.save({"state": {}, "param_groups": [], "more": Touch(tmp_path / "ran")}, folder / "optimizer.pt")
    with pytest.raises(StateMismatch, match=r"refused: names posix\.system, which is code"):
        import_checkpoint(folder, tmp_path / "run")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_run_is_refused(begun: Any, run: Path) -> None:
    with pytest.raises(ConfigurationError, match="has a run already"):
        import_checkpoint(begun[0] / f"checkpoint-{BEGUN}", run)


def test_sharded_weights_and_pickled_ones(begun: Any, imported: Path, tmp_path: Path) -> None:
    source = begun[0] / f"checkpoint-{BEGUN}"
    whole = load_file(source / "model.safetensors")
    folder = Path(shutil.copytree(source, tmp_path / "folder"))
    for name in (*PICKLES, "model.safetensors"):
        (folder / name).unlink()
    net = model()
    net.load_state_dict(whole, strict=False)
    net.save_pretrained(folder, max_shard_size="4KB")
    shards = list(folder.glob("model*"))
    assert len(shards) > 2
    runs = [import_checkpoint(folder, tmp_path / "from-shards").run]
    for path in shards:
        path.unlink()
    torch.save(net.state_dict(), folder / "pytorch_model.bin")
    runs.append(import_checkpoint(folder, tmp_path / "from-pickle").run)
    for run in runs:
        assert run.model.keys() == whole.keys()
        assert all(torch.equal(run.model[name], whole[name]) for name in whole)
    assert runs[1].tied == {"lm_head.weight": "model.embed_tokens.weight"}
