"""The adapters of a checkpoint as a folder of peft: what ``PeftModel.save_pretrained`` writes, without the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import dalsegno as ds
from checkpoint.sameness import assert_same
from dalsegno.checkpoint import CheckpointManager, ModelState
from dalsegno.checkpoint.names import SETTINGS
from dalsegno.cli import main
from dalsegno.stateful.component import Component
from dalsegno.training.checkpoint_contents import adapter_settings
from support.small import ByteLines, arguments

CONFIGS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "v_proj"]},
    "dora": {"target_modules": ["q_proj"], "use_dora": True, "modules_to_save": ["lm_head"]},
}


def base() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def trainer(folder: Path, steps: int = 3, save_frozen: str = "once", **settings: Any) -> ds.Trainer:
    model = get_peft_model(base(), LoraConfig(r=4, lora_dropout=0.1, **settings))
    args = arguments(folder, max_steps=steps, save_steps=2, save_frozen=save_frozen)
    return ds.Trainer(model, args, train_dataset=ByteLines())


def outputs(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(12).reshape(2, 6)).logits
    return logits


@pytest.mark.parametrize("kind", CONFIGS)
def test_peft_reads_what_it_would_have_written(tmp_path: Path, kind: str) -> None:
    trained = trainer(tmp_path / "run", **CONFIGS[kind])
    trained.train()
    trained.model.save_pretrained(tmp_path / "theirs")
    done = ds.export_adapters(tmp_path / "run", tmp_path / "ours")
    assert {path.name for path in done.files} == {"adapter_config.json", "adapter_model.safetensors"}
    ours, theirs = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("ours", "theirs"))
    assert_same(dict(sorted(ours.items())), dict(sorted(theirs.items())))
    assert torch.equal(outputs(PeftModel.from_pretrained(base(), tmp_path / "ours")), outputs(trained.model))
    configurations = [json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in ("ours", "theirs")]
    assert {name for name in configurations[1] if configurations[0].get(name) != configurations[1][name]} <= {
        "auto_mapping",
        "peft_version",
        "target_modules",
    }


def test_each_adapter_has_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = get_peft_model(base(), LoraConfig(r=4, target_modules=["q_proj"]))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    run = ds.Trainer(model, arguments(tmp_path / "run", max_steps=1, save_steps=1), train_dataset=ByteLines())
    run.train()
    assert main(["checkpoints", "export", str(tmp_path / "run"), "--to", str(tmp_path / "ours"), "--adapters"]) == 0
    assert "adapter_model.safetensors" in capsys.readouterr().out
    read = PeftModel.from_pretrained(base(), tmp_path / "ours")
    read.load_adapter(tmp_path / "ours" / "other", "other")
    for adapter in ("default", "other"):
        read.set_adapter(adapter)
        run.model.set_adapter(adapter)
        assert torch.equal(outputs(read), outputs(run.model))


def test_the_whole_model_is_not_exported_for_from_pretrained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = trainer(tmp_path / "run", **CONFIGS["lora"])
    trained.train()
    base().save_pretrained(tmp_path / "base")
    export = ["checkpoints", "export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]
    assert main([*export, "--config-from", str(tmp_path / "base")]) != 0
    assert "(default), so its tensors have peft's names" in (error := capsys.readouterr().err)
    assert "(--adapters)" in error and not (tmp_path / "out").exists()
    assert main(export) == 0
    assert "into a model that get_peft_model returns" in capsys.readouterr().out
    other = trainer(tmp_path / "other", **CONFIGS["lora"]).model
    other.load_state_dict(load_file(tmp_path / "out/model.safetensors"))
    assert torch.equal(outputs(other), outputs(trained.model))


def no_adapter(folder: Path) -> None:
    ds.Trainer(base(), arguments(folder, max_steps=1, save_steps=1), train_dataset=ByteLines()).train()


def trained_biases(folder: Path) -> None:
    trainer(folder, bias="all", **CONFIGS["lora"]).train()


def half_left_out(folder: Path) -> None:
    run = trainer(folder, save_frozen="never", **CONFIGS["lora"])
    for name, parameter in run.model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    run.train()


@pytest.mark.parametrize(
    ("run", "error"),
    [
        (no_adapter, "has no adapters"),
        (trained_biases, "bias='all' trains biases of the base"),
        (half_left_out, r"no values of 2 frozen parameters \(.*lora_A.*left out; resume the run"),
    ],
)
def test_what_has_no_adapter_folder_is_refused(tmp_path: Path, run: Callable[[Path], None], error: str) -> None:
    run(tmp_path / "run")
    with pytest.raises((ds.NotFound, ds.ConfigurationError), match=error):
        ds.export_adapters(tmp_path / "run", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_an_adapter_is_not_overwritten(tmp_path: Path) -> None:
    trainer(tmp_path / "run", **CONFIGS["lora"]).train()
    ds.export_adapters(tmp_path / "run", tmp_path / "ours")
    with pytest.raises(ds.ConfigurationError, match=r"contains adapter_config\.json already"):
        ds.export_adapters(tmp_path / "run", tmp_path / "ours")


def test_no_adapter_is_written_if_the_folder_of_one_contains_an_adapter(tmp_path: Path) -> None:
    model = get_peft_model(base(), LoraConfig(r=4, target_modules=["q_proj"]))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"]))
    ds.Trainer(model, arguments(tmp_path / "run", max_steps=1, save_steps=1), train_dataset=ByteLines()).train()
    (tmp_path / "ours" / "other").mkdir(parents=True)
    (tmp_path / "ours" / "other" / "adapter_config.json").write_text("{}")
    with pytest.raises(ds.ConfigurationError, match=r"other: contains adapter_config\.json already"):
        ds.export_adapters(tmp_path / "run", tmp_path / "ours")
    assert [each.name for each in (tmp_path / "ours").iterdir()] == ["other"]
    assert (tmp_path / "ours" / "other" / "adapter_config.json").read_text() == "{}"


class Settings:
    """Settings of a run that only have the configurations of adapters."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def save(folder: Path, model: nn.Module, settings: dict[str, Any]) -> None:
    CheckpointManager(folder).save(1, [ModelState(model)], [Component(SETTINGS, Settings(settings))])


@pytest.mark.parametrize("adapter", ["", "/victim", "a/victim", "a\\victim", "a\0victim"])
def test_an_adapter_never_leaves_the_folder(tmp_path: Path, adapter: str) -> None:
    if adapter.startswith("/"):
        adapter = str(tmp_path / "victim").replace(".", "_")
    model = nn.ModuleDict({"q_proj": nn.ModuleDict({"lora_A": nn.Module()})})
    model.get_submodule("q_proj.lora_A")._modules[adapter] = nn.Linear(2, 2, bias=False)
    save(tmp_path / "run", model, {f"adapters.{adapter}.r": 8, f"adapters.{adapter}.peft_type": "LORA"})
    with pytest.raises(ds.DamagedCheckpoint, match="is not a name that an adapter's folder can have"):
        ds.export_adapters(tmp_path / "run", tmp_path / "ours")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_modules_may_have_the_name_of_the_adapter(tmp_path: Path) -> None:
    trunk = nn.ModuleDict({"policy": nn.Linear(4, 4)})
    net = nn.ModuleDict({"policy": nn.Linear(4, 4), "trunk": trunk, "head": nn.Linear(4, 2)})
    settings = LoraConfig(r=2, target_modules=["policy"], exclude_modules=["trunk.policy"], modules_to_save=["head"])
    adapted = get_peft_model(net, settings, adapter_name="policy")
    adapted.save_pretrained(str(tmp_path / "theirs"))
    model = nn.ModuleDict({"policy": adapted, "value": nn.Linear(4, 1)})
    save(tmp_path / "run", model, adapter_settings(model))
    ds.export_adapters(tmp_path / "run", tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / each / "policy" / "adapter_model.safetensors") for each in ("ours", "theirs"))
    assert len(ours) == 4
    assert_same(dict(sorted(ours.items())), dict(sorted(theirs.items())))


def test_another_configuration_is_reported_when_the_run_resumes(tmp_path: Path) -> None:
    trainer(tmp_path, **CONFIGS["lora"]).train()
    changed = trainer(tmp_path, steps=4, lora_alpha=32, **CONFIGS["lora"])
    changes: list[str] = []

    class Report(ds.Callback):
        def on_load(self, ctx: ds.LoadContext) -> None:
            changes.extend(str(each) for each in ctx.report.changes)

    changed.add_callback(Report())
    changed.train()
    assert any(each.startswith("adapters.default.lora_alpha: saved 8, now 32") for each in changes)
