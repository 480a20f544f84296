"""A checkpoint's model, exported and read by transformers, safetensors and plain torch."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from transformers import LlamaForCausalLM

import dalsegno as ds
from checkpoint import llama
from checkpoint.jobs import Net
from dalsegno.checkpoint import CheckpointManager, ModelState
from dalsegno.testing import run_ranks
from support.disks import small_disk
from support.small import ByteLines, arguments


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, bool, Any]]:
    """By whether embeddings are tied: a run of two FSDP2 ranks, whether they are, and what the model was at its end."""
    folder = tmp_path_factory.mktemp("runs")
    first, _ = run_ranks(llama.train_tied_and_untied, 2, folder)
    return {tied: (folder / str(tied), tied, weights) for tied, weights in first.items()}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def trained(request: pytest.FixtureRequest, runs: Any) -> Any:
    return runs[request.param]


@pytest.mark.parametrize("max_shard_size", ["5GB", "4KB"])
def test_transformers_reads_a_run_of_two_ranks(trained: Any, tmp_path: Path, max_shard_size: str) -> None:
    from transformers import LlamaForCausalLM

    run, tied, expected = trained
    llama.config(tied).save_pretrained(tmp_path / "config")
    done = ds.export_model(run, tmp_path / "out", max_shard_size=max_shard_size, config_from=tmp_path / "config")
    assert done.checkpoint == run / "checkpoints/step-00000002"
    assert [path.name for path in done.copied] == ["config.json"]

    model, info = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=llama.Sentences()[0]["input_ids"][None]).logits[0]
    np.testing.assert_allclose(logits.numpy(), expected["logits"], rtol=1e-5, atol=1e-6)
    for name, tensor in model.state_dict().items():
        assert np.array_equal(tensor.numpy(), expected["state"][name]), name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def splittable() -> Any:
    config = llama.config(tied=True)
    config.num_key_value_heads = 2
    return config


def train_split(output_dir: Path, split: bool) -> None:
    parallel = ds.TensorParallel("auto", size=2) if split else "none"
    settings = arguments(output_dir, max_steps=2, save_steps=2, parallel=parallel)
    torch.manual_seed(0)
    ds.Trainer(LlamaForCausalLM(splittable()), settings, train_dataset=ByteLines()).train()


def test_transformers_reads_what_ranks_have_split_by_a_plan(tmp_path: Path) -> None:
    train_split(tmp_path / "whole", False)
    run_ranks(train_split, 2, tmp_path / "split", True)
    splittable().save_pretrained(tmp_path)
    read = {}
    for name in ("whole", "split"):
        ds.export_model(tmp_path / name, tmp_path / "out" / name, config_from=tmp_path)
        model, info = LlamaForCausalLM.from_pretrained(tmp_path / "out" / name, output_loading_info=True)
        assert not any(info.values()), info
        read[name] = model.state_dict()
    torch.testing.assert_close(read["split"], read["whole"], rtol=1e-4, atol=1e-5)


def test_one_file_or_several_as_the_size_says(trained: Any, tmp_path: Path) -> None:
    run, tied, expected = trained
    whole = ds.export_model(run, tmp_path / "one")
    assert [path.name for path in whole.files] == ["model.safetensors"]
    loaded = load_file(tmp_path / "one/model.safetensors")
    missing = {"lm_head.weight"} if tied else set()
    assert set(loaded) == set(expected["state"]) - missing
    assert all(np.array_equal(loaded[name].numpy(), expected["state"][name]) for name in loaded)

    split = ds.export_model(run / "checkpoints", tmp_path / "many", max_shard_size=4000)
    *shards, index = split.files
    content = json.loads(index.read_bytes())
    assert index.name == "model.safetensors.index.json"
    assert [path.name for path in shards] == [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    assert content["metadata"]["total_size"] == sum(each.nbytes for each in loaded.values())
    assert set(content["weight_map"].values()) == {path.name for path in shards}
    pieces = {path.name: load_file(path) for path in shards}
    assert max(sum(each.nbytes for each in piece.values()) for piece in pieces.values()) <= 4000
    for name, file in content["weight_map"].items():
        assert torch.equal(pieces[file][name], loaded[name]), name


def test_plain_torch_reads_tied_weights_by_load_model(tmp_path: Path) -> None:
    net = Net(seed=3)
    CheckpointManager(tmp_path).save(1, [ModelState(net)], [])
    done = ds.export_model(tmp_path / "checkpoints/step-00000001", tmp_path / "out")
    assert done.tied == {"head.weight": "embed.weight"}
    other = Net(seed=4)
    load_model(other, str(tmp_path / "out/model.safetensors"))
    assert all(torch.equal(one, two) for one, two in zip(net.parameters(), other.parameters(), strict=True))
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


class Many(nn.Module):
    """32 tensors of 8 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.full((2 << 20,), float(number)) for number in range(32))


def save_many(folder: Path) -> None:
    CheckpointManager(folder).save(1, [ModelState(Many())], [])


def test_memory_stays_under_one_shard(tmp_path: Path) -> None:
    run_ranks(save_many, 1, tmp_path)
    small, large = tmp_path / "small", tmp_path / "large"
    run_ranks(save_small, 1, small)
    (growth,) = run_ranks(growth_in_export, 1, small, tmp_path, large)
    assert growth < 128 << 20
    assert sum(path.stat().st_size for path in large.glob("*.safetensors")) > 256 << 20


def save_small(folder: Path) -> None:
    CheckpointManager(folder).save(1, [ModelState(nn.Linear(3, 3))], [])


def growth_in_export(small: Path, folder: Path, target: Path) -> int:
    """By how many bytes the largest memory grows over that of exporting something small."""
    ds.export_model(small, small / "out")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ds.export_model(folder, target, max_shard_size="128MB")
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.fixture
def small(tmp_path: Path) -> Path:
    save_small(tmp_path)
    return tmp_path


def test_no_model_is_written_over(small: Path) -> None:
    target = small / "out"
    ds.export_model(small, target)
    before = (target / "model.safetensors").read_bytes()
    with pytest.raises(
        ds.ConfigurationError, match=r"out: contains model\.safetensors already; choose another directory"
    ):
        ds.export_model(small, target)
    assert (target / "model.safetensors").read_bytes() == before
    with pytest.raises(ds.ConfigurationError, match=r"model\.safetensors: is there, and is not a directory; remove"):
        ds.export_model(small, target / "model.safetensors" / "inner")


def test_a_disk_that_is_too_small_gets_no_part_of_a_model(tmp_path: Path) -> None:
    CheckpointManager(tmp_path / "run").save(1, [ModelState(nn.Linear(300, 100))], [])
    with (
        small_disk(tmp_path / "disk", kilobytes=100) as disk,
        pytest.raises(ds.CannotSave, match=r"out: the model takes 1\d\d kB, and \d+ kB are free on this disk"),
    ):
        ds.export_model(tmp_path / "run", disk / "out")
    assert not [*(tmp_path / "disk").glob("out/*")]


def test_a_folder_with_a_configuration_is_taken(small: Path) -> None:
    target = small / "out"
    target.mkdir()
    (target / "config.json").write_text("{}")
    ds.export_model(small, target)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("size", ["five", "5XB", "-1", 0, "0.1B", ""])
def test_what_is_no_size(small: Path, size: Any) -> None:
    with pytest.raises(
        ds.ConfigurationError, match=r"max_shard_size: .* is not a number of bytes; use a number or a text like '5GB'"
    ):
        ds.export_model(small, small / "out", max_shard_size=size)
    assert not (small / "out").exists()


def test_a_damaged_checkpoint_is_not_exported(small: Path) -> None:
    shard = small / "checkpoints/step-00000001/model/shard-00000.safetensors"
    *content, last = shard.read_bytes()
    shard.write_bytes(bytes([*content, last ^ 1]))
    with pytest.raises(ds.DamagedCheckpoint, match=r"shard-00000\.safetensors: has checksum"):
        ds.export_model(small, small / "out")
    assert not (small / "out").exists()


def test_of_a_run_the_newest_that_verifies(small: Path) -> None:
    CheckpointManager(small).save(2, [ModelState(nn.Linear(3, 3))], [])
    shard = small / "checkpoints/step-00000002/model/shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert ds.export_model(small, small / "out").checkpoint.name == "step-00000001"
    assert shard.exists()


def test_what_safetensors_cannot_hold(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("wave", torch.zeros(3, dtype=torch.complex64))
    CheckpointManager(tmp_path).save(1, [ModelState(model)], [])
    with pytest.raises(ds.CannotSave, match=r"model\.wave: safetensors has no complex64"):
        ds.export_model(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_to_export(tmp_path: Path) -> None:
    with pytest.raises(ds.NotFound, match="there is no checkpoint"):
        ds.export_model(tmp_path, tmp_path / "out")
    with pytest.raises(ds.NotFound, match="there is no such folder"):
        ds.export_model(tmp_path / "gone", tmp_path / "out")


def test_no_configuration_there(small: Path) -> None:
    with pytest.raises(ds.NotFound, match=r"there is no config\.json or tokenizer"):
        ds.export_model(small, small / "out", config_from=small)
