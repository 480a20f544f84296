"""A new run that starts from a part of another run, or from weights that another program saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

import dalsegno as ds
from checkpoint import llama
from dalsegno.checkpoint import CheckpointManager, ModelState, load_weights, read_tensors
from dalsegno.logs import RunFile
from dalsegno.testing import run_ranks, start_ranks
from support.listeners import Trace
from support.models import Tied
from support.tuned import tuned, tuned_in_parallel, tuned_until


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of another run; it has a callback with a state."""
    folder = tmp_path_factory.mktemp("origin")
    empty = folder / "weights"
    save_model(Tied(), make(empty) / "model.safetensors")
    tuned(folder / "run", empty, Trace())
    return folder / "run/checkpoints/step-00000004"


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def saved_model(folder: Path, seed: int = 1, **how: Any) -> dict[str, Tensor]:
    """A model that was never ours, in ``model.safetensors``."""
    torch.manual_seed(seed)
    model = Tied(**how)
    save_model(model, make(folder) / "model.safetensors")
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """The model's, under every name."""
    found = CheckpointManager(checkpoint.parents[1]).find(checkpoint)
    assert found is not None
    tensors = read_tensors(found)["model"]
    return {**tensors, "back.weight": tensors["second.weight"]}


def assert_loaded(seen: dict[str, Any], expected: dict[str, Tensor]) -> None:
    assert seen["weights"].keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(seen["weights"][name], tensor.numpy(), err_msg=name)


# --- from another run -------------------------------------------------------------------------------------------------


def test_only_the_model_of_another_run(tmp_path: Path, origin: Path) -> None:
    """The run is a new one: it begins at step 0, with its own optimizer, data and callbacks."""
    seen = tuned(tmp_path, origin, Trace())
    assert_loaded(seen, tensors_of(origin))
    assert seen["loads"] == [("step-00000004", 0)]
    assert (seen["report"].restored, seen["report"].fresh, seen["report"].carried) == (["model"], [], [])
    assert seen["steps"] == 4
    assert [leg.from_checkpoint for leg in RunFile(tmp_path).load().legs] == [None]


@pytest.mark.parametrize("kill_at", [2, 4], ids=["before its first checkpoint", "after it"])
def test_the_same_script_resumes_after_a_kill(tmp_path: Path, origin: Path, kill_at: int) -> None:
    """The new run starts over until it has its own checkpoint, which it then resumes from."""
    (whole,) = run_ranks(tuned, 1, tmp_path / "whole", origin)
    (outcome,) = start_ranks(tuned_until, 1, tmp_path / "killed", origin, kill_at).wait()
    assert outcome.was_killed
    (seen,) = run_ranks(tuned, 1, tmp_path / "killed", origin)
    assert seen["loads"] == ([("step-00000004", 0)] if kill_at == 2 else [("step-00000002", 2)])
    first, second = (tensors_of(tmp_path / run / "checkpoints/step-00000004") for run in ("whole", "killed"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert whole["steps"] == seen["steps"] == 4


def test_where_it_came_from_may_be_gone_by_then(tmp_path: Path) -> None:
    saved_model(tmp_path / "weights")
    tuned(tmp_path / "run", tmp_path / "weights")
    assert tuned(tmp_path / "run", tmp_path / "nowhere")["loads"] == [("step-00000004", 4)]


def test_a_callback_and_the_optimizer_too(tmp_path: Path, origin: Path) -> None:
    trace = Trace()
    seen = tuned(tmp_path, origin, trace, load_components=("model", "optimizer", "Trace"))
    assert sorted(seen["report"].restored) == ["callbacks.Trace", "model", "optimizer"]
    assert trace.steps == 8
    assert seen["lr"] == [0.01, 0.01], "of this run's schedule, not the zero that the other one has ended with"


def test_another_head(tmp_path: Path, origin: Path) -> None:
    with pytest.raises(ds.StateMismatch, match=r"(?s)head\.weight: saved as \[1, 8\].*allow_changes=\(\"model\",\)"):
        tuned(tmp_path, origin, heads=3)
    seen = tuned(tmp_path, origin, heads=3, allow_changes=("model",))
    there = tensors_of(origin)
    torch.manual_seed(7)
    fresh = Tied(3).state_dict()
    assert_loaded(seen, {name: fresh[name] if name.startswith("head") else there[name] for name in fresh})
    assert "head.weight: saved as [1, 8] float32, here [3, 8] float32" in seen["report"].table()


def test_a_damaged_origin_is_an_error(tmp_path: Path, origin: Path) -> None:
    copy = tmp_path / "origin/step-00000004"
    shutil.copytree(origin, copy)
    shard = copy / "model/shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    with pytest.raises(ds.DamagedCheckpoint, match="shard-00000"):
        tuned(tmp_path / "run", copy)


# --- from other programs' files ---------------------------------------------------------------------------------------


def test_a_file_of_safetensors(tmp_path: Path) -> None:
    expected = saved_model(tmp_path / "weights")
    assert_loaded(tuned(tmp_path / "folder", tmp_path / "weights"), expected)
    assert_loaded(tuned(tmp_path / "file", tmp_path / "weights/model.safetensors"), expected)


def in_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """As save_pretrained writes a model that is too large for one file."""
    where = {name: f"model-{number % 3 + 1:05d}-of-00003.safetensors" for number, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name].contiguous() for name in tensors if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize("kept", ["second.weight", "back.weight"], ids=["first name", "second name"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_shards_on_two_ranks(tmp_path: Path, parallel: str, kept: str) -> None:
    """Sharded, each rank reads its own part; a weight with two names is there under either of them."""
    expected = saved_model(tmp_path / "weights")
    dropped = {"second.weight", "back.weight"} - {kept}
    stored = {name: tensor for name, tensor in expected.items() if name not in dropped}
    in_shards(make(tmp_path / "shards"), stored)
    count = sum(tensor.numel() for tensor in stored.values())
    both = run_ranks(tuned_in_parallel, 2, tmp_path / "run", tmp_path / "shards", parallel)
    for seen in both:
        assert_loaded(seen, expected)
        assert seen["steps"] == 4
        assert seen["read"] == count if parallel == "ddp" else seen["read"] < 0.75 * count
    again = run_ranks(tuned_in_parallel, 2, tmp_path / "run", tmp_path / "shards", parallel)
    assert [seen["loads"] for seen in again] == [[("step-00000004", 4)]] * 2


def test_one_weight_that_was_saved_twice(tmp_path: Path) -> None:
    expected = saved_model(tmp_path / "weights")
    twice = {name: tensor.clone() for name, tensor in expected.items()}
    save_file(twice, make(tmp_path / "twice") / "model.safetensors")
    assert_loaded(tuned(tmp_path / "first", tmp_path / "twice"), expected)
    twice["back.weight"] += 1
    save_file(twice, tmp_path / "twice/model.safetensors")
    with pytest.raises(ds.StateMismatch, match=r"back\.weight: tied to second\.weight here, but saved as two"):
        tuned(tmp_path / "second", tmp_path / "twice")


def test_another_precision_is_cast_and_said(tmp_path: Path) -> None:
    expected = saved_model(tmp_path / "weights")
    halved = {name: each.bfloat16() if each.is_floating_point() else each for name, each in expected.items()}
    del halved["back.weight"]
    save_file(halved, make(tmp_path / "half") / "model.safetensors")
    seen = tuned(tmp_path / "run", tmp_path / "half")
    assert_loaded(seen, {name: each.bfloat16().to(each.dtype) for name, each in expected.items()})
    assert seen["report"].notes == ["model: cast 10 tensor(s) from bfloat16 to float32"]


@pytest.mark.parametrize("there", ["model.", ""])
def test_names_that_begin_otherwise(tmp_path: Path, there: str) -> None:
    """Names of a model inside another module: the error has one line for it."""
    expected = saved_model(tmp_path / "weights")
    tensors = {f"{there}{name}": each.clone() for name, each in expected.items()}
    save_file(tensors, make(tmp_path / "other") / "model.safetensors")
    if there:
        with pytest.raises(
            ds.StateMismatch, match=r"12 of 12 names would match with the prefix 'model\.' that those there"
        ):
            tuned(tmp_path / "run", tmp_path / "other")
    else:
        assert tuned(tmp_path / "run", tmp_path / "other")["steps"] == 4


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_a_model_that_does_not_fit_hears_every_name(tmp_path: Path) -> None:
    save_model(Other(), make(tmp_path / "other") / "model.safetensors")
    with pytest.raises(ds.StateMismatch) as raised:
        tuned(tmp_path / "run", tmp_path / "other")
    lines = str(raised.value).splitlines()
    assert lines[0] == f"{tmp_path}/other: the saved state does not fit this run; nothing was loaded:"
    assert "    unexpected in the checkpoint: layer.weight [2, 2] float32" in lines
    assert sum("missing in the checkpoint" in line for line in lines) == 12
    assert not list((tmp_path / "run/checkpoints").glob("*"))


def test_a_llama_of_transformers(tmp_path: Path) -> None:
    """Written by ``save_pretrained`` in several files, tied, read into a new one."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(3)
    source = LlamaForCausalLM(llama.config(True))
    source.save_pretrained(tmp_path / "llama", max_shard_size="4KB")
    assert (tmp_path / "llama/model.safetensors.index.json").exists()
    torch.manual_seed(4)
    target = LlamaForCausalLM(llama.config(True))
    load_weights(tmp_path / "llama", ModelState(target))
    assert target.lm_head.weight is target.model.embed_tokens.weight
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[name]), name


# --- refusals --------------------------------------------------------------------------------------------------------


def test_invalid_names_and_paths(tmp_path: Path, origin: Path) -> None:
    saved_model(tmp_path / "weights")
    run = tmp_path / "run"
    with pytest.raises(ds.UnknownName, match="unknown component in load_components 'modle'; did you mean 'model'"):
        tuned(run, origin, load_components=("modle",))
    with pytest.raises(ds.UnknownName, match="unknown component in load_components 'trainer'; "):
        tuned(run, origin, load_components=("trainer",))
    with pytest.raises(ds.UnknownName, match=r"unknown component in .*weights: 'optimizer'; known: model"):
        tuned(run, tmp_path / "weights", load_components=("model", "optimizer"))
    with pytest.raises(ds.UnknownName, match=r"unknown component in .*step-00000004: 'callbacks\.Mine'"):
        tuned(run, origin, Trace(name="Mine"), load_components=("Mine",))
    with pytest.raises(ds.ConfigurationError, match=r"load_components=\['model'\]: pass resume_from_checkpoint="):
        tuned(run, True)  # type: ignore[arg-type]
    with pytest.raises(ds.ConfigurationError, match=r"contains weights only, so no run .* pass load_components="):
        tuned(run, tmp_path / "weights", load_components=())
    with pytest.raises(ds.NotFound, match=r"nowhere: not a checkpoint, not a .safetensors file, not a directory with"):
        tuned(run, tmp_path / "nowhere")


def with_header(folder: Path, header: dict[str, Any], data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    (make(folder) / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "ten terabytes": ({"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}, "are not a float32"),
    "outside": ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]}}, "its header has invalid data_offsets"),
    "another length": ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}}, "are not a float32"),
    "no shape": ({"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 16]}}, "has the shape 'x'"),
    "no entry": ({"a": 3}, "its header is not a safetensors header"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(tmp_path: Path, name: str) -> None:
    header, complaint = HOSTILE[name]
    with pytest.raises(ds.DamagedCheckpoint, match=complaint):
        tuned(tmp_path / "run", with_header(tmp_path / "weights", header, b"\0" * 16))


def test_a_type_that_is_not_known(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F4", "shape": [32], "data_offsets": [0, 16]}}
    with pytest.raises(ds.StateMismatch, match="a has the dtype 'F4', which this dalsegno does not support"):
        tuned(tmp_path / "run", with_header(tmp_path / "weights", header, b"\0" * 16))


def test_a_header_that_is_cut_off(tmp_path: Path) -> None:
    (make(tmp_path / "weights") / "model.safetensors").write_bytes((10**13).to_bytes(8, "little") + b"{}")
    with pytest.raises(ds.DamagedCheckpoint, match="its header is truncated"):
        tuned(tmp_path / "run", tmp_path / "weights")


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "model.bin", 3])
def test_an_index_that_leads_elsewhere(tmp_path: Path, file: Any) -> None:
    index = make(tmp_path / "weights") / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ds.DamagedCheckpoint, match="not an index of safetensors"):
        tuned(tmp_path / "run", tmp_path / "weights")


def test_an_index_that_names_what_is_not_there(tmp_path: Path) -> None:
    in_shards(make(tmp_path / "weights"), {"a": torch.ones(2), "b": torch.ones(2)})
    index = tmp_path / "weights/model.safetensors.index.json"
    where = json.loads(index.read_text())
    where["weight_map"]["c"] = where["weight_map"]["a"]
    index.write_text(json.dumps(where))
    with pytest.raises(ds.DamagedCheckpoint, match="c is not both in the index and in the files"):
        tuned(tmp_path / "run", tmp_path / "weights")


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    torch.save(Tied().state_dict(), make(tmp_path / "weights") / "pytorch_model.bin")
    with pytest.raises(ds.NotFound, match=r"pytorch_model.bin is a pickle, which dalsegno never reads"):
        tuned(tmp_path / "run", tmp_path / "weights")
