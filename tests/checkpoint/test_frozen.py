"""Frozen parameters are written once: later checkpoints link their file, and each is still whole."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.fsdp import fully_shard

import dalsegno as ds
from checkpoint.frozen import FROZEN, Part, content
from checkpoint.sameness import assert_same
from dalsegno.checkpoint import Checkpoint, CheckpointManager, checkpoint_dir, read_tensors
from dalsegno.checkpoint.file_reading import FileRecord
from dalsegno.checkpoint.file_writing import LinkableFiles, UnchangedFile
from dalsegno.cli import main
from dalsegno.errors import DamagedCheckpoint
from dalsegno.logs import RunFile
from dalsegno.system import filesystem
from dalsegno.testing import TinyRegression, run_ranks
from support.crash import Crash
from support.small import small_trainer


def inode(path: Path) -> int:
    return (path / FROZEN).stat().st_ino


def expect_saved(path: Path, expected: dict[str, torch.Tensor]) -> None:
    checkpoint = Checkpoint.open(path)
    checkpoint.verify(checkpoint.manifest.files)
    assert_same(read_tensors(checkpoint)["model"], expected)


def test_an_unchanged_file_is_linked_and_each_checkpoint_lives_alone(tmp_path: Path) -> None:
    part = Part(tmp_path / "run")
    paths, saved = [], []
    for step in (1, 2, 3):
        paths.append(part.save(step))
        saved.append(content(part))
    assert len({inode(path) for path in paths}) == 1
    assert not torch.equal(saved[0]["1.weight"], saved[2]["1.weight"])
    shutil.copytree(paths[1], tmp_path / "elsewhere" / "step-00000002")
    checkpoint_dir.delete(paths[0])
    paths[1].rename(tmp_path / "moved")
    expect_saved(paths[2], saved[2])
    expect_saved(tmp_path / "moved", saved[1])
    shutil.rmtree(tmp_path / "run")
    expect_saved(tmp_path / "elsewhere" / "step-00000002", saved[1])
    other = Part(tmp_path / "other", seed=1)
    other.load(tmp_path / "elsewhere" / "step-00000002")
    assert_same(content(other), saved[1])
    assert inode(other.save(3)) != inode(tmp_path / "elsewhere" / "step-00000002")  # it is not this run's own


def test_a_resumed_run_links_what_it_has_verified(tmp_path: Path) -> None:
    first = Part(tmp_path).save(1)
    part = Part(tmp_path, seed=1)
    part.load()
    second = part.save(2)
    assert inode(first) == inode(second)
    expect_saved(second, content(part))


def test_a_run_that_has_verified_nothing_links_the_newest_on_disk(tmp_path: Path) -> None:
    part = Part(tmp_path)
    first = part.save(1)
    part.manager = CheckpointManager(tmp_path)  # as in a leg that resumed from memory
    second = part.save(2)
    assert inode(first) == inode(second)
    expect_saved(second, content(part))


def test_what_it_links_was_verified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    part = Part(tmp_path)
    first = part.save(1)
    damage(first / FROZEN)
    part.manager = CheckpointManager(tmp_path)
    second = part.save(2)
    assert "not shared with later checkpoints" in caplog.text
    assert "step-00000001/model/frozen-00000.safetensors: has checksum" in caplog.text
    assert inode(first) != inode(second)
    expect_saved(second, content(part))
    assert inode(part.save(3)) == inode(second)


def test_a_run_that_crashes_and_resumes_from_memory_has_one_base(tmp_path: Path) -> None:
    def leg(*callbacks: ds.Callback) -> None:
        model = TinyRegression()
        model.layers[0].requires_grad_(False)
        settings = {"max_steps": 12, "save_steps": 4, "save_in_background": False, "save_in_memory": "Every(steps=1)"}
        small_trainer(tmp_path, *callbacks, model=model, **settings).train()

    for step in (6, 10):
        with pytest.raises(RuntimeError, match="CUDA error"):
            leg(Crash(step))
    leg()
    run = RunFile(tmp_path).load()
    assert run is not None
    assert [Path(leg.from_checkpoint or "").name for leg in run.legs] == ["", "step-00000006", "step-00000010"]
    assert len({inode(tmp_path / f"checkpoints/step-{step:08d}") for step in (4, 8, 12)}) == 1


@pytest.mark.parametrize("full", ["write", "link"])
def test_a_save_that_failed_on_a_full_disk_does_not_unlearn_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    part = Part(tmp_path)
    first = part.save(1)
    with monkeypatch.context() as patched:
        fail_at(patched, full, errno.ENOSPC)
        with pytest.raises(ds.SaveFailed, match="No space left"):
            part.save(2)
    second = part.save(3)
    assert inode(first) == inode(second)
    expect_saved(second, content(part))


@pytest.mark.parametrize("refusal", [errno.ENOENT, errno.ESTALE, errno.EACCES])
def test_a_file_that_could_not_be_linked_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """It is not tried again, so that the save after the failed one succeeds, whatever was the matter."""
    part = Part(tmp_path)
    first = part.save(1)
    fail_at(monkeypatch, "link", refusal)
    with pytest.raises(ds.SaveFailed):
        part.save(2)
    second = part.save(3)
    assert inode(first) != inode(second)
    expect_saved(second, content(part))


def fail_at(monkeypatch: pytest.MonkeyPatch, operation: str, error: int) -> None:
    """Let each such operation on the disk fail."""

    def watch(begun: str, path: Path) -> None:
        if begun == operation:
            raise OSError(error, os.strerror(error), str(path))

    monkeypatch.setattr(filesystem, "watcher", watch)


def damage(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(5000)
        stream.write(b"\xff\x00\xff")


def test_a_frozen_tensor_that_was_changed_in_place_is_written(tmp_path: Path) -> None:
    part = Part(tmp_path)
    first, before = part.save(1), content(part)
    part.model[0].weight.data[3, 3] += 1  # which no version counter shows
    second = part.save(2)
    assert inode(first) != inode(second)
    expect_saved(second, content(part))
    third = part.save(3)
    assert inode(second) == inode(third)
    checkpoint_dir.delete(second)
    expect_saved(third, content(part))
    assert torch.equal(read_tensors(Checkpoint.open(first))["model"]["0.weight"], before["0.weight"])


@pytest.mark.parametrize("save", [1, 2])
def test_a_background_save_has_the_frozen_tensors_as_they_were(tmp_path: Path, save: int) -> None:
    """Whether they are copied (the first save) or only hashed (the later ones), before training continues."""
    part = Part(tmp_path)
    for step in range(1, save):
        part.save(step)
    expected = content(part)
    done = part.manager.save_async(save, part.sharded, [])
    with torch.no_grad():
        part.model[0].weight.fill_(7)
    done.wait()
    assert done.failure is None
    expect_saved(done.path, expected)


def test_no_copy_of_unchanged_tensors_is_kept_in_memory(tmp_path: Path) -> None:
    part = Part(tmp_path)
    held = []
    for step in (1, 2):
        part.manager.save_async(step, part.sharded, []).wait()
        held.append({*part.manager._snapshotter._buffers})
    assert FROZEN in held[0]
    assert FROZEN not in held[1]


def test_a_parameter_moves_to_another_file_when_it_is_frozen_or_not_any_more(tmp_path: Path) -> None:
    part = Part(tmp_path)
    first = part.save(1)
    part.model[0].bias.requires_grad_(True)
    second = part.save(2)
    assert (second / FROZEN).stat().st_size < (first / FROZEN).stat().st_size
    expect_saved(second, content(part))
    part.model[1].requires_grad_(False)
    part.model[0].bias.requires_grad_(False)
    third = part.manager.save(3, part.sharded, [])
    assert not (third / "model/shard-00000.safetensors").exists()
    expect_saved(third, content(part))
    part.model.requires_grad_(True)
    fourth = part.manager.save(4, part.sharded, [])
    assert not (fourth / FROZEN).exists()
    expect_saved(fourth, content(part))


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.EMLINK, errno.EXDEV])
def test_where_links_are_refused_the_file_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    part = Part(tmp_path)
    first = part.save(1)

    def refuse(*paths: Any) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "link", refuse)
    second = part.save(2)
    assert inode(first) != inode(second)
    assert sorted(each.name for each in (second / "model").iterdir()) == [
        "frozen-00000.safetensors",
        "shard-00000.safetensors",
    ]
    checkpoint_dir.delete(first)
    expect_saved(second, content(part))


def test_a_damaged_file_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save fails, and the next one writes the tensors again."""
    part = Part(tmp_path)
    first = part.save(1)
    damage(first / FROZEN)

    def refuse(*paths: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    failed = part.manager.save_async(2, part.sharded, [])
    failed.wait()
    assert "frozen-00000.safetensors: has checksum" in str(failed.failure)
    assert not failed.path.exists()
    expect_saved(part.save(3), content(part))


def test_a_copy_that_fails_leaves_no_file_and_blames_its_own_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*paths: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    here, there = tmp_path / "here", tmp_path / "there"
    filesystem.make_directory(there)
    filesystem.write_durably(here, b"content")
    record = FileRecord(7, xxhash.xxh3_128(b"content").hexdigest())
    copy = UnchangedFile("copy", record, here, LinkableFiles(tmp_path, {"here": record}))
    monkeypatch.setattr(os, "link", no_links)
    with monkeypatch.context() as full, pytest.raises(OSError, match="quota") as error:
        full.setattr(filesystem, "start_writeback", refuse)
        copy.write_to(there, lambda count: None)
    assert error.value.filename != str(here)
    here.write_bytes(b"damaged")
    with pytest.raises(DamagedCheckpoint, match="here: has checksum"):
        copy.write_to(there, lambda count: None)
    assert not list(there.iterdir())


def test_a_checkpoint_that_was_removed_is_not_missed(tmp_path: Path) -> None:
    part = Part(tmp_path)
    shutil.rmtree(part.save(1))
    expect_saved(part.save(2), content(part))


def test_a_link_never_carries_a_write(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    filesystem.write_durably(one, b"first")
    filesystem.link(one, other)
    filesystem.write_durably(other, b"second")
    assert (one.read_bytes(), other.read_bytes()) == (b"first", b"second")


def lora_of_rank(rank: int) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    model: torch.nn.Module = get_peft_model(
        LlamaForCausalLM(config), LoraConfig(r=rank, target_modules=["q_proj", "v_proj"])
    )
    return model


@pytest.mark.parametrize("rank", [4, 64])
def test_a_lora_run_writes_what_is_trained_and_the_constant_of_the_docs(tmp_path: Path, rank: int) -> None:
    model = lora_of_rank(rank)
    tokens = [{"input_ids": each, "labels": each} for each in torch.arange(64).reshape(8, 8)]
    small_trainer(tmp_path, model=model, parts={"train_dataset": tokens}, max_steps=2, save_steps=1).train()
    files = [each.stat() for each in (tmp_path / "checkpoints/step-00000002").rglob("*") if each.is_file()]
    written = sum(each.st_size for each in files if each.st_nlink == 1)
    trained = [each for each in model.parameters() if each.requires_grad]
    frozen = [each for each in model.parameters() if not each.requires_grad]
    constant = 35_000 + 1_200 * len(trained) + 150 * len(frozen)
    assert written <= 1.05 * 3 * sum(each.nbytes for each in trained) + constant


def test_a_save_of_a_lora_run_writes_what_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of all write calls: at most 1.05 × the adapters and their optimizer's state."""
    part = Part(tmp_path)
    part.model = lora_of_rank(128)
    trained = [each for each in part.model.parameters() if each.requires_grad]
    part.optimizer = torch.optim.AdamW(trained)
    part.step = lambda: train(part)  # type: ignore[method-assign]
    part.save(1)
    written = []
    original = os.write
    monkeypatch.setattr(os, "write", lambda file, data: (written.append(len(data)), original(file, data))[1])
    path = part.save(2)
    states = [each for state in part.optimizer.state.values() for each in state.values()]
    assert sum(written) <= 1.05 * sum(each.nbytes for each in (*trained, *states))
    expect_saved(path, content(part))


def train(part: Part) -> None:
    tokens = torch.arange(16).reshape(2, 8)
    part.optimizer.zero_grad()
    part.model(input_ids=tokens, labels=tokens).loss.backward()
    part.optimizer.step()


def test_the_sizes_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = Part(tmp_path)
    base = (part.save(1) / FROZEN).stat().st_size
    for step in (2, 3):
        part.save(step)

    def listed() -> list[dict[str, Any]]:
        assert main(["checkpoints", "list", str(tmp_path), "--json"]) == 0
        rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return rows

    rows = listed()
    assert [row["size"] - row["on_disk"] for row in rows] == [0, base, base]
    assert main(["checkpoints", "prune", str(tmp_path), "--keep-latest", "1", "--json"]) == 0
    pruned = json.loads(capsys.readouterr().out)
    assert [row["freed"] for row in pruned] == [row["size"] - base for row in pruned[:2]] + [0]
    (left,) = listed()
    assert left["on_disk"] == left["size"]


def save_on_ranks(folder: Path, is_fsdp: bool) -> list[str]:
    part = Part(folder)
    if is_fsdp:
        for layer in part.model:
            fully_shard(layer)
        fully_shard(part.model)
        part.optimizer = torch.optim.AdamW([each for each in part.model.parameters() if each.requires_grad], lr=0.1)
    paths = [part.save(step) for step in (1, 2)]
    part.model[0].requires_grad_(True)
    part.model[0].requires_grad_(False)
    paths.append(part.save(3))
    dist.barrier()
    if dist.get_rank() == 0:
        checkpoint_dir.delete(paths[0])
        checkpoint_dir.delete(paths[1])
    name = f"model/frozen-{dist.get_rank():05d}.safetensors"
    dist.barrier()
    assert (paths[2] / name).stat().st_nlink == 1
    return sorted(path.name for path in (paths[2] / "model").iterdir())


@pytest.mark.parametrize("is_fsdp", [False, True], ids=["replicated", "fsdp"])
def test_each_rank_links_its_part(tmp_path: Path, is_fsdp: bool) -> None:
    names = run_ranks(save_on_ranks, 2, tmp_path / "two", is_fsdp)
    assert {"frozen-00000.safetensors", "frozen-00001.safetensors"} < {*names[0]}
    alone = Part(tmp_path / "alone")
    for step in (1, 2, 3):
        last = alone.save(step)
    frozen = {name: each for name, each in content(alone).items() if name.startswith("0.")}
    there = tmp_path / "two" / "checkpoints" / last.name
    read = read_tensors(Checkpoint.open(there))["model"]
    assert_same({name: read[name] for name in frozen}, frozen)
    other = Part(tmp_path / "other", seed=1)
    other.load(there)
    assert_same({name: content(other)[name] for name in frozen}, frozen)


def fail_on_one_rank(folder: Path) -> list[bool]:
    """Whether this rank's file is that of the save before: after a save that rank 1 could not link, and in a process
    that has verified nothing."""
    part = Part(folder)
    paths = [part.save(1)]
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            fail_at(patched, "link", errno.EACCES)
        with pytest.raises(ds.SaveFailed, match="rank 1"):
            part.save(2)
    paths.append(part.save(3))
    part.manager = CheckpointManager(folder)
    paths.append(part.save(4))
    dist.barrier()
    files = [path / f"model/frozen-{dist.get_rank():05d}.safetensors" for path in paths]
    return [former.samefile(file) for former, file in itertools.pairwise(files)]


def test_only_the_rank_whose_file_could_not_be_linked_writes_it(tmp_path: Path) -> None:
    assert run_ranks(fail_on_one_rank, 2, tmp_path) == [[True, True], [False, True]]
