"""``save_pretrained=True``: each checkpoint's own directory is a model that transformers and peft load."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import xxhash
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

import dalsegno as ds
from checkpoint import llama
from checkpoint.jobs import Net
from dalsegno.checkpoint.file_reading import FileRecord, share_of_rank, verify_files
from dalsegno.checkpoint.listing import newest_verified
from dalsegno.checkpoint.remote.download import fetch_newer
from dalsegno.checkpoint.remote.store import Store
from dalsegno.interop import cerebras, instructlab, kempner
from dalsegno.system import filesystem
from dalsegno.testing import run_ranks, start_ranks
from support.small import arguments

LINKED = "model/shard-00000.safetensors"


def gpt2() -> nn.Module:
    """Tied, and a part of it frozen."""
    model: nn.Module = GPT2LMHeadModel(GPT2Config(vocab_size=llama.VOCABULARY, n_embd=16, n_layer=1, n_head=2))
    model.transformer.h[0].requires_grad_(False)  # type: ignore[union-attr, index]
    return model


def tiny_llama() -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(llama.config(tied=False), dtype=torch.bfloat16)
    return model


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "word": 1}, unk_token="[PAD]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", chat_template="{{ messages }}")


def trainer(folder: str | Path, model: nn.Module, *callbacks: Any, **settings: Any) -> ds.Trainer:
    args = arguments(folder, **{"max_steps": 2, "save_steps": 1, "save_pretrained": True, **settings})
    return ds.Trainer(
        model, args, train_dataset=llama.Sentences(), processing_class=tokenizer(), callbacks=list(callbacks)
    )


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=llama.Sentences()[0]["input_ids"][None]).logits
    return found


def is_link(checkpoint: Path, name: str, target: str = LINKED) -> bool:
    return (checkpoint / name).samefile(checkpoint / target)


@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
@pytest.mark.parametrize("make", [tiny_llama, gpt2])
def test_a_checkpoint_is_what_transformers_loads(tmp_path: Path, make: Any, background: bool) -> None:
    trained = trainer(tmp_path, make(), save_in_background=background)
    checkpoint = trained.train().checkpoint
    assert checkpoint is not None
    found, info = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(info.values()), info
    assert type(found) is type(trained.model) and found.dtype == trained.model.dtype
    assert torch.equal(logits(found), logits(trained.model))
    assert AutoTokenizer.from_pretrained(checkpoint).pad_token == "[PAD]"

    weights = [path.name for path in checkpoint.glob("model*.safetensors")]
    assert all((checkpoint / name).stat().st_nlink >= 2 for name in weights), "they take no space of their own"
    if make is gpt2:
        assert sorted(weights) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        assert is_link(checkpoint, "model-00001-of-00002.safetensors", "model/frozen-00000.safetensors")
        former = checkpoint.with_name("step-00000001") / "model-00001-of-00002.safetensors"
        assert former.samefile(checkpoint / "model-00001-of-00002.safetensors"), (
            "nor do frozen ones in later checkpoints"
        )
    else:
        assert weights == ["model.safetensors"] and is_link(checkpoint, "model.safetensors")
    manifest = newest_verified(tmp_path).manifest
    there = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert there == {*manifest.files, "manifest.json"}


CONFIGURATION = """
from transformers import PretrainedConfig


class Config(PretrainedConfig):
    model_type = "own"
"""
MODEL = """
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_own import Config


class Own(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.embedding, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)
        self.post_init()

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embedding(input_ids))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)
"""


def test_a_model_with_code_of_its_own(tmp_path: Path) -> None:
    """Whose modules are beside its weights, for ``trust_remote_code=True``."""
    classes = {"AutoConfig": "configuration_own.Config", "AutoModelForCausalLM": "modeling_own.Own"}
    (tmp_path / "own").mkdir()
    (tmp_path / "own/config.json").write_text(json.dumps({"model_type": "own", "auto_map": classes}))
    (tmp_path / "own/configuration_own.py").write_text(CONFIGURATION)
    (tmp_path / "own/modeling_own.py").write_text(MODEL)
    config = AutoConfig.from_pretrained(tmp_path / "own", trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    checkpoint = trainer(tmp_path / "run", model).train().checkpoint
    shutil.rmtree(tmp_path / "own")
    found = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
    assert torch.equal(logits(found), logits(model))


def test_it_is_kept_and_deleted_with_its_checkpoint_and_resumed_from(tmp_path: Path) -> None:
    trainer(tmp_path, gpt2(), save_total_limit=1).train()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    again = trainer(tmp_path, gpt2(), save_total_limit=1, max_steps=3)
    checkpoint = again.train().checkpoint
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    assert torch.equal(logits(GPT2LMHeadModel.from_pretrained(checkpoint)), logits(again.model))


@pytest.mark.parametrize(
    ("chosen", "steps"), [("Every(epochs=1)", [4, 7]), ("AtSteps(3)", [3, 7]), ("AtEnd()", [7]), ("Every()", [])]
)
def test_only_the_chosen_ones_and_the_last(tmp_path: Path, chosen: str, steps: list[int]) -> None:
    """An epoch has four steps."""
    trainer(tmp_path, gpt2(), save_pretrained=chosen, max_steps=7).train()
    assert [int(path.parent.name[5:]) for path in sorted(tmp_path.rglob("config.json"))] == steps


def test_without_the_setting_there_is_nothing_of_it(tmp_path: Path) -> None:
    checkpoint = trainer(tmp_path, gpt2(), save_pretrained=False, max_steps=1).train().checkpoint
    assert checkpoint is not None
    assert not [*checkpoint.glob("model*.safetensors*"), *checkpoint.glob("*config*"), *checkpoint.glob("tokenizer*")]


def test_at_a_url_weights_are_sent_and_received_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    send = Store.send
    monkeypatch.setattr(
        Store, "send", lambda store, path, name, *rest: (sent.append(name), send(store, path, name, *rest))
    )
    fsspec.filesystem("memory").store.clear()
    trained = trainer("memory://runs/a", gpt2(), local_dir=tmp_path / "one", save_steps=2)
    trained.train()
    of_model = [name for name in sent if name.endswith(".safetensors") and "model" in name]
    assert [Path(name).parent.name for name in of_model] == ["model", "model"]
    assert fetch_newer(Store("memory://runs/a"), tmp_path / "two", None) == 2
    fsspec.filesystem("memory").store.clear()
    checkpoint = tmp_path / "two/checkpoints/step-00000002"
    assert is_link(checkpoint, "model-00001-of-00002.safetensors", "model/frozen-00000.safetensors")
    assert torch.equal(logits(GPT2LMHeadModel.from_pretrained(checkpoint)), logits(trained.model))


def test_what_a_full_disk_refuses_is_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first save; the second one is made."""

    def full(what: str, path: Path) -> None:
        if path.name == "config.json" and path.parent.name == "step-00000001.partial":
            raise OSError(errno.ENOSPC, "no space left", str(path))

    monkeypatch.setattr(filesystem, "watcher", full)
    checkpoint = trainer(tmp_path, gpt2()).train().checkpoint
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    GPT2LMHeadModel.from_pretrained(checkpoint)


# --- several ranks --------------------------------------------------------------------------------------------------


def train_in_both_modes(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    found = {}
    for mode in ("ddp", "fsdp"):
        trained = trainer(folder / mode, GPT2LMHeadModel(gpt2().config), parallel=mode, per_device_train_batch_size=2)
        trained.train()
        state = trained.model.state_dict()
        whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}
        found[mode] = {name: each.numpy() for name, each in whole.items()}
    return found


def test_two_ranks(tmp_path: Path) -> None:
    """Whole tensors of all ranks are linked; pieces of FSDP2 are put together."""
    expected, _ = run_ranks(train_in_both_modes, 2, tmp_path)
    for mode, there in expected.items():
        checkpoint = newest_verified(tmp_path / mode).path
        found, info = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
        assert not any(info.values()), info
        assert type(found) is GPT2LMHeadModel
        state = found.state_dict()
        assert state.keys() == there.keys() and all(np.array_equal(state[name], there[name]) for name in there)
        links = [path.stat().st_nlink for path in checkpoint.glob("model*.safetensors")]
        assert links == ([2, 2] if mode == "ddp" else [1])


# --- adapters -------------------------------------------------------------------------------------------------------


def with_adapter(base: Path, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    settings = {"target_modules": ["q_proj"], "r": 2, "task_type": "CAUSAL_LM", **settings}
    return get_peft_model(LlamaForCausalLM.from_pretrained(base), LoraConfig(**settings))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    LlamaForCausalLM(llama.config(tied=False)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("save_frozen", ["once", "never"])
def test_adapters_are_what_peft_loads(tmp_path: Path, base: Path, save_frozen: str) -> None:
    model = with_adapter(base)
    if save_frozen == "once":
        model.add_adapter("second", LoraConfig(r=4, target_modules=["v_proj"]))  # type: ignore[operator]
    trained = trainer(tmp_path / "run", model, save_frozen=save_frozen)
    checkpoint = trained.train().checkpoint
    assert checkpoint is not None and not list(checkpoint.glob("model*.safetensors"))
    expected = logits(trained.model)
    assert not torch.equal(expected, logits(LlamaForCausalLM.from_pretrained(base)))
    for found in (
        PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), checkpoint),
        AutoPeftModelForCausalLM.from_pretrained(checkpoint),
        AutoModelForCausalLM.from_pretrained(checkpoint),
    ):
        assert torch.equal(logits(found), expected)
    if save_frozen == "once":
        second = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), checkpoint / "second")
        assert second.peft_config["default"].r == 4
    newest_verified(tmp_path / "run")


# --- refused, before anything is trained ----------------------------------------------------------------------------


def test_what_no_from_pretrained_loads_is_refused(tmp_path: Path, base: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match="save_pretrained=True needs checkpoints; see save_steps"):
        arguments(tmp_path, save_pretrained=True)
    with pytest.raises(ds.ConfigurationError, match=r"a checkpoint\.jobs\.Net is neither a model of transformers nor"):
        trainer(tmp_path, Net(0))
    with pytest.raises(ds.ConfigurationError, match='save_frozen="never" leaves out frozen weights'):
        trainer(tmp_path, gpt2(), save_frozen="never")
    with pytest.raises(ds.ConfigurationError, match="adapter default: bias='all' trains biases of the base model"):
        trainer(tmp_path, with_adapter(base, bias="all"))
    model = with_adapter(base)
    model.add_adapter("second", LoraConfig(r=4, target_modules=["v_proj"]))  # type: ignore[operator]
    with pytest.raises(ds.ConfigurationError, match='save_frozen="never" leaves out frozen weights of adapter second'):
        trainer(tmp_path, model, save_frozen="never")


# --- killed, and seen by callbacks ----------------------------------------------------------------------------------


def train_and_die(folder: Path, name: str) -> None:
    """Exit in the second save, when the file ``name`` is written or linked."""

    def die(what: str, path: Path) -> None:
        if name in path.name and path.parent.name == "step-00000002.partial":
            os._exit(9)

    filesystem.watcher = die
    trainer(folder, gpt2()).train()


@pytest.mark.parametrize("name", ["model-00001", "model.safetensors.index.json", "tokenizer.json", "manifest.json"])
def test_a_kill_leaves_the_older_one(tmp_path: Path, name: str) -> None:
    (end,) = start_ranks(train_and_die, 1, tmp_path, name).wait()
    assert end.exit_code == 9, end.error
    first = tmp_path / "checkpoints/step-00000001"
    assert newest_verified(tmp_path).path == first
    GPT2LMHeadModel.from_pretrained(first)
    trained = trainer(tmp_path, gpt2())
    checkpoint = trained.train().checkpoint
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00000001", "step-00000002"}
    assert torch.equal(logits(GPT2LMHeadModel.from_pretrained(checkpoint)), logits(trained.model))


def test_every_dialect_gets_a_path_that_loads(tmp_path: Path) -> None:
    at_save: list[dict[str, torch.Tensor]] = []
    loaded: list[dict[str, torch.Tensor]] = []
    paths: dict[str, list[Path]] = {}

    class Own(ds.Callback):
        def on_before_save(self, ctx: Any) -> None:
            at_save.append({name: each.detach().clone() for name, each in ctx.model.state_dict().items()})

        def on_save(self, ctx: Any) -> None:
            paths.setdefault("dalsegno", []).append(ctx.path)

    class HuggingFace(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = f"{args.output_dir}/checkpoint-{state.global_step}"  # which is there meanwhile
            loaded.append(AutoModelForCausalLM.from_pretrained(folder).state_dict())

    class InstructLab(instructlab.TrainerCallback):
        def on_save(self, context: Any) -> None:
            paths.setdefault("instructlab", []).append(Path(context.checkpoint_path))

    class Kempner(kempner.TrainingHook):
        def on_checkpoint_save(self, step: int, path: str) -> None:
            paths.setdefault("kempner", []).append(Path(path))

    class Cerebras(cerebras.Callback):
        def on_after_save_checkpoint(self, trainer: Any, ckpt_path: Any) -> None:
            paths.setdefault("cerebras", []).append(Path(ckpt_path))

    callbacks = [Own(), HuggingFace(), InstructLab(), Kempner(), Cerebras()]
    trainer(tmp_path, gpt2(), *callbacks, save_steps=2, max_steps=4).train()
    expected = [tmp_path / f"checkpoints/step-{step:08d}" for step in (2, 4)]
    assert paths == dict.fromkeys(("dalsegno", "instructlab", "kempner", "cerebras"), expected)
    loaded += [AutoModelForCausalLM.from_pretrained(path).state_dict() for path in expected]
    for found, wanted in zip(loaded, [*at_save, *at_save], strict=True):
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    model = gpt2()
    args = arguments(tmp_path, max_steps=2, save_steps=2, save_pretrained=True)
    batches = torch.utils.data.DataLoader(llama.Sentences(), batch_size=4)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    with ds.Run(args, model=model, optimizer=optimizer, loader=batches) as run:
        for batch in run.batches():
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step_end(loss=loss)
    assert torch.equal(logits(GPT2LMHeadModel.from_pretrained(newest_verified(tmp_path).path)), logits(model))


def test_a_file_of_two_names_is_one_and_a_copy_is_not(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"content")
    (tmp_path / "link").hardlink_to(tmp_path / "one")
    (tmp_path / "copy").write_bytes(b"damaged")
    record = FileRecord(7, xxhash.xxh3_128_hexdigest(b"content"))
    verify_files(tmp_path, ["one", "link"], record)
    with pytest.raises(ds.DamagedCheckpoint, match="copy: has checksum"):
        verify_files(tmp_path, ["one", "link", "copy"], record)


def test_one_rank_verifies_a_file_of_two_names() -> None:
    files = {name: FileRecord(size, checksum) for name, size, checksum in [("a", 8, "x"), ("b", 6, "y"), ("c", 8, "x")]}
    assert [share_of_rank(files, rank, 2) for rank in range(2)] == [["a", "c"], ["b"]]
