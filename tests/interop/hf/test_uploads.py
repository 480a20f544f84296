"""Integrations that upload models find them; those that cannot are refused before training, with another way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

import dalsegno as ds
from dalsegno.checkpoint import export
from support.held_saves import hold_save
from support.listeners import Listener
from support.small import small_trainer

QUIET = {"max_steps": 4, "save_steps": 2}


def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, use_cache=False
    )
    return LlamaForCausalLM(config)


def texts(number: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(16, (number, 6), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


class Uploader(TrainerCallback):  # type: ignore[misc]
    """Of the contract of the integrations: its folder is named after the step, below ``output_dir``."""

    def __init__(self) -> None:
        self.files: list[list[str]] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.states: list[dict[str, Any]] = []
        self.losses: list[float] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.files.append(sorted(path.name for path in folder.iterdir()))
        self.weights.append(load_file(folder / "model.safetensors"))
        self.states.append(json.loads((folder / "trainer_state.json").read_text()))
        if (folder / "config.json").exists():
            batch = {name: each[None] for name, each in texts(1)[0].items()}
            self.losses.append(LlamaForCausalLM.from_pretrained(folder)(**batch).loss.item())


def test_on_save_is_left_out_where_the_disk_is_too_small_for_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(export, "free_disk", lambda path: 10)
    uploader = Uploader()
    result = small_trainer(tmp_path, uploader, model=tiny_llama(), parts={"train_dataset": texts(16)}, **QUIET).train()
    assert result.global_step == 4 and not uploader.files and not [*tmp_path.glob("checkpoint-*")]
    assert "Uploader.on_save is left out at step 4: " in caplog.text and "10 B are free" in caplog.text


def test_a_callback_finds_the_checkpoint_that_it_uploads(tmp_path: Path) -> None:
    uploader = Uploader()
    parts = {"train_dataset": texts(16)}
    trainer = small_trainer(tmp_path, uploader, model=tiny_llama(), parts=parts, **QUIET)
    trainer.train()
    files = ["config.json", "dalsegno.json", "generation_config.json", "model.safetensors", "trainer_state.json"]
    assert uploader.files == [files, files]
    assert [state["global_step"] for state in uploader.states] == [2, 4]
    batch = {name: each[None] for name, each in texts(1)[0].items()}
    assert uploader.losses[-1] == trainer.model(**batch).loss.item()
    assert not list(tmp_path.glob("checkpoint-*")), "it is there during on_save only"


def test_what_a_callback_writes_into_the_checkpoint_is_kept(tmp_path: Path) -> None:
    class Saver(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (folder / "processor.json").write_text(str(state.global_step))
            (folder / "model").mkdir()
            (folder / "model" / "adapter").touch()

    small_trainer(tmp_path, Saver(), **QUIET).train()
    checkpoints = sorted((tmp_path / "checkpoints").iterdir())
    assert [(each / "processor.json").read_text() for each in checkpoints] == ["2", "4"]
    assert all((each / "model.0001" / "adapter").exists() for each in checkpoints), "not among the model's own shards"
    assert small_trainer(tmp_path, Saver(), max_steps=5).train().global_step == 5
    assert not list(tmp_path.glob("checkpoint-*"))


class Tokens:
    """Writes into a folder."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokens").mkdir()
        (Path(folder) / "tokens" / "words.json").write_text("{}")


def test_no_callback_damages_the_checkpoint(tmp_path: Path) -> None:
    """It overwrites all files, one of which was once a link, adds another beside them, and fails."""

    class Overwrites(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            for each in filter(Path.is_file, folder.rglob("*")):
                each.write_text("of the callback")
            (folder / "tokens" / "more.json").touch()
            raise RuntimeError("the disk of the hub is full")

    parts = {"processing_class": Tokens()}
    with pytest.raises(RuntimeError, match="the disk of the hub is full"):
        small_trainer(tmp_path, Overwrites(), parts=parts, **QUIET).train()
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    small_trainer(tmp_path, parts=parts, max_steps=3).train(resume_from_checkpoint=checkpoint)
    assert [each.name for each in (checkpoint / "tokens").iterdir()] == ["more.json"]
    assert not list(tmp_path.glob("checkpoint-*"))


def test_the_weights_are_those_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three more steps are done when the checkpoint is published."""
    at_save: dict[str, torch.Tensor] = {}

    def keep(ctx: Any) -> None:
        at_save.update({name: tensor.clone() for name, tensor in ctx.model.state_dict().items()} if not at_save else {})

    uploader = Uploader()
    keeper = Listener({"on_before_save": keep}, name="keeper")
    small_trainer(tmp_path, hold_save(monkeypatch, 4, until=7), keeper, uploader, max_steps=8, save_steps=4).train()
    assert uploader.weights[0].keys() == at_save.keys()
    assert all(torch.equal(uploader.weights[0][name], at_save[name]) for name in at_save)


def test_a_folder_of_another_program_is_not_uploaded(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(b"of another run")
    with pytest.raises(ds.ConfigurationError, match="a callback would upload it as this run's; move it away"):
        small_trainer(tmp_path, Uploader(), **QUIET).train()
    assert (tmp_path / "checkpoint-2" / "model.safetensors").read_bytes() == b"of another run"


def test_a_folder_that_a_killed_upload_has_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    for name in ("dalsegno.json", "model.safetensors"):
        (tmp_path / "checkpoint-2" / name).write_text("{}")
    small_trainer(tmp_path, uploader := Uploader(), **QUIET).train()
    assert [len(each) for each in uploader.weights] == [len(uploader.weights[1])] * 2


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield wandb
    wandb.finish()


@pytest.mark.parametrize("mode", ["checkpoint", "end"])
def test_models_for_weights_and_biases(
    mode: str, tmp_path: Path, wandb_offline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import WandbCallback

    monkeypatch.setenv("WANDB_LOG_MODEL", mode)
    logged: list[tuple[list[str], list[str]]] = []

    class Watched(WandbCallback):  # type: ignore[misc]
        def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
            super().setup(args, state, model, **kwargs)
            run = self._wandb.run
            for owner in (run, self._wandb):
                monkeypatch.setattr(owner, "log_artifact", note)

    def note(artifact: Any, aliases: list[str]) -> None:
        logged.append((aliases, sorted(artifact.manifest.entries)))

    parts = {"train_dataset": texts(16)}
    result = small_trainer(tmp_path / "run", Watched(), model=tiny_llama(), parts=parts, **QUIET).train()
    assert result.reason == "finished"
    aliases = [alias for alias, _ in logged if alias != ["base_model"]]
    checkpoints = [[f"epoch_{step / 4}", f"checkpoint_global_step_{step}"] for step in (2, 4)]
    assert aliases == [*(checkpoints if mode == "checkpoint" else []), ["final_model"]]
    for alias, files in logged:
        assert alias == ["base_model"] or {"model.safetensors", "config.json"} <= set(files)


def test_artifacts_for_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas", reason="mlflow logs models with it")
    mlflow = pytest.importorskip("mlflow")
    from transformers.integrations import MLflowCallback

    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "1")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    assert small_trainer(tmp_path / "run", MLflowCallback(), **QUIET).train().reason == "finished"
    assert len(list((tmp_path / "mlruns").rglob("model.safetensors"))) == 2
    mlflow.end_run()


def of_transformers(name: str, **attributes: Any) -> Any:
    """A callback of the contract of one of theirs, whose own library is not installed."""
    return type(name, (TrainerCallback,), {"__module__": "transformers.integrations.own", **attributes})()


def test_an_upload_that_cannot_work_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match=r"DVCLiveCallback\(log_model=True\).*use log_model='all'"):
        small_trainer(tmp_path, of_transformers("DVCLiveCallback", _log_model=True))
    small_trainer(tmp_path, of_transformers("DVCLiveCallback", _log_model="all"), max_steps=1).train()


# --- arguments that the integrations log ------------------------------------------------------------------------------


def test_arguments_are_a_dataclass_of_plain_values(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert Path(args.output_dir).is_dir()
            assert (Path(args.output_dir) / "logs").is_dir()
            seen.append(args)

    small_trainer(tmp_path / "new" / "run", Look(), save_strategy="epoch", run_name="one")
    (args,) = seen
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.init}
    assert dataclasses.is_dataclass(args)
    assert values["save_strategy"] == "epoch" and values["learning_rate"] == 0.01
    plain = (str, int, float, bool, type(None), list, dict)
    assert {type(value) for value in args.to_dict().values()} <= set(plain), "no enum, which YAML has no word for"
    assert json.loads(json.dumps(args.to_dict())) == args.to_dict()
