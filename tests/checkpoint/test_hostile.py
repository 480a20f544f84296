"""A hostile checkpoint: pickles in place of dalsegno's files. It is refused, and none of its code runs.

In a process of its own, with an audit hook that ends it at once if anything is unpickled, compiled, executed or
started while the checkpoint is verified and loaded.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from checkpoint import jobs
from checkpoint.parts import Saved
from dalsegno.checkpoint import CheckpointManager
from dalsegno.checkpoint.manifest import _checksum_of
from dalsegno.errors import DamagedCheckpoint
from dalsegno.testing import run_ranks, start_ranks


class Bomb:
    def __reduce__(self) -> Any:
        return exec, ("import pathlib; pathlib.Path('/tmp/dalsegno-bomb').touch()",)


def agreeing_manifest(directory: Path) -> None:
    """Make the manifest say of every file what it is now, as an enemy would."""
    path = directory / "manifest.json"
    content = json.loads(path.read_bytes())
    for name in content["files"]:
        digest = xxhash.xxh3_128()
        with (directory / name).open("rb") as file:
            while data := file.read(1 << 20):  # of a gigabyte, too
                digest.update(data)
            content["files"][name] = {"size": file.tell(), "xxh3": digest.hexdigest()}
    del content["xxh3"]
    path.write_text(json.dumps(content | {"xxh3": _checksum_of(content)}))


@pytest.mark.parametrize("manifest_agrees", [False, True])
def test_pickles_in_place_of_everything(tmp_path: Path, manifest_agrees: bool) -> None:
    manager = CheckpointManager(tmp_path)
    Saved().save(manager, 1)
    directory = manager.path_of(1)
    payload = pickle.dumps(Bomb())
    for path in directory.rglob("*.*"):
        if path.name != "manifest.json":
            path.write_bytes(payload.ljust(path.stat().st_size, b"."))
    if manifest_agrees:
        agreeing_manifest(directory)
    (error,) = run_ranks(jobs.load_with_audit_hook, 1, tmp_path)
    assert error.startswith("DamagedCheckpoint: ")


@pytest.mark.parametrize("name", ["index.json", "shared.json", "shared.safetensors"])
def test_a_pickle_in_place_of_one_file(tmp_path: Path, name: str) -> None:
    manager, saved = CheckpointManager(tmp_path), Saved()
    saved.save(manager, 1)
    directory = manager.path_of(1)
    (directory / name).write_bytes(pickle.dumps(Bomb()))
    agreeing_manifest(directory)
    found = manager.find()
    assert found is not None
    with pytest.raises(OSError, match=name):
        manager.load(found, saved.sharded, saved.components)


def test_a_pickle_as_manifest(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    Saved().save(manager, 1)
    (manager.path_of(1) / "manifest.json").write_bytes(pickle.dumps(Bomb()))
    (error,) = run_ranks(jobs.load_with_audit_hook, 1, tmp_path)
    assert error.startswith("DamagedCheckpoint: ") and "manifest.json" in error


def test_that_the_hook_sees_a_pickle(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(pickle.dumps(Bomb()))
    (end,) = start_ranks(jobs.unpickle_with_audit_hook, 1, path).wait()
    assert end.exit_code == 66


def edited(directory: Path, name: str, old: str, new: str) -> None:
    path = directory / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    agreeing_manifest(directory)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("index.json", '"ranks":[0', '"ranks":[7'),
        ("index.json", '"ranks":[0', '"ranks":[-1'),
        ("index.json", '"ranks":[0', '"ranks":[16777216'),
        ("index.json", '"ranks":[0', '"ranks":["../../../../etc/passwd"'),
        ("index.json", '"mesh":[1', '"mesh":[3'),
        ("index.json", '"mesh":[1', '"mesh":[0'),
        ("index.json", '"mesh":[1', '"mesh":[281474976710655,281474976710655'),
        ("index.json", '"cuts":[', '"cuts":[[0,9]'),
        ("index.json", '"cuts":[', '"cuts":[[9,0]'),
        ("index.json", '"cuts":[', '"cuts":[[0,0],[0,0]'),
        ("index.json", '"cuts":[', '"cuts":[[0]'),
        ("index.json", '"sharding":0', '"sharding":1'),
        ("index.json", '"sharding":0', '"sharding":-1'),
        ("index.json", '"sharding":0', '"sharding":0,"replica":1'),
        ("index.json", '"sharding":0', '"sharding":0,"frozen":true'),
        ("index.json", '"dtype":"float32"', '"dtype":"load"'),
        ("index.json", '"shape":[7', '"shape":[7000000000000'),
        ("index.json", '"shape":[7', '"shape":[-7'),
        ("index.json", '"shape":[7', '"shape":[true'),
        ("index.json", '"shape":[7', '"shape":[7.0'),
        ("index.json", '"format":1', '"format":4'),
        ("index.json", '"format":1', '"format":[1]'),
        ("index.json", '"model.0.', '"model.9.'),
        ("shared.json", '"$tensor"', '"$int"'),
        ("shared.json", '"dtype":"float32"', '"dtype":"object"'),
        ("shared.json", '"format":1', '"format":9'),
        ("shared.json", '"$tensor"', '"$pickle"'),
        ("shared.json", '"states":[{', '"states":[3,{'),
        ("shared.json", '"groups":', '"gruppen":'),
        ("shared.json", '"params":[', '"params":[[],'),
    ],
)
def test_a_lie_in_one_place(tmp_path: Path, name: str, old: str, new: str) -> None:
    manager, saved = CheckpointManager(tmp_path), Saved()
    saved.save(manager, 1)
    edited(manager.path_of(1), name, old, new)
    found = manager.find()
    assert found is not None
    with pytest.raises((OSError, ValueError)) as raised:
        manager.load(found, saved.sharded, saved.components)
    assert type(raised.value).__module__ == "dalsegno.errors", raised.value


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"0.weight":', b'"9.weight":'),
        (b'"data_offsets":[0,', b'"data_offsets":[8,'),
        (b'"data_offsets":[', b'"data_offsets":{'),
    ],
)
def test_a_header_that_contradicts_the_index_changes_nothing(tmp_path: Path, old: bytes, new: bytes) -> None:
    manager, saved = CheckpointManager(tmp_path), Saved()
    saved.save(manager, 1)
    path = manager.path_of(1) / "model/shard-00000.safetensors"
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    agreeing_manifest(manager.path_of(1))
    other = Saved()
    before = [each.clone() for each in other.model.parameters()]
    found = manager.find()
    assert found is not None
    with pytest.raises(DamagedCheckpoint, match="shard-00000"):
        manager.load(found, other.sharded, other.components)
    assert all(torch.equal(was, now) for was, now in zip(before, other.model.parameters(), strict=True))


DEEP = "[" * 200_000 + "]" * 200_000
TEN_TB = 10 << 40


def lay_header(directory: Path, header: bytes) -> None:
    with (directory / "shared.safetensors").open("r+b") as file:
        file.write(header)
    agreeing_manifest(directory)


def deep_state(directory: Path) -> None:
    path = directory / "shared.json"
    content = path.read_text()
    begin = content.index('"states":[') + len('"states":[')
    path.write_text(content[:begin] + DEEP + "," + content[begin:])
    agreeing_manifest(directory)


def claim_size(directory: Path, size: int) -> None:
    path = directory / "manifest.json"
    content = json.loads(path.read_bytes())
    content["files"]["shared.json"]["size"] = size
    del content["xxh3"]
    path.write_text(json.dumps(content | {"xxh3": _checksum_of(content)}))


def hole(directory: Path) -> None:
    """A sparse file of the recorded size: only reading it finds the fault."""
    claim_size(directory, 1 << 30)
    os.truncate(directory / "shared.json", 1 << 30)


def folder_elsewhere(directory: Path) -> None:
    (directory / "model").rename(directory.parent / "elsewhere")
    (directory / "model").symlink_to(directory.parent / "elsewhere")


def device(path: Path) -> None:
    """One that never ends."""
    path.unlink()
    try:
        os.mknod(path, 0o644 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("no devices can be made here")


def listening(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        former = Path.cwd()
        os.chdir(path.parent)  # the name of one must be short
        server.bind(path.name)
        os.chdir(former)


def lay_index(directory: Path, tensor: dict[str, Any]) -> None:
    """In place of the index entry of one tensor of the model."""
    path = directory / "index.json"
    content = json.loads(path.read_bytes())
    content["tensors"]["model.0.weight"] |= tensor
    path.write_text(json.dumps(content))
    agreeing_manifest(directory)


LIES = {
    "a manifest of 1 GB": lambda at: os.truncate(at / "manifest.json", 1 << 30),
    "a manifest that is a device": lambda at: device(at / "manifest.json"),
    "a manifest that is a pipe": lambda at: ((at / "manifest.json").unlink(), os.mkfifo(at / "manifest.json")),
    "a file that is a device": lambda at: device(at / "shared.json"),
    "a file that is a socket": lambda at: listening(at / "shared.json"),
    "a link to a device": lambda at: ((at / "shared.json").unlink(), (at / "shared.json").symlink_to("/dev/zero")),
    "a folder of devices": lambda at: (shutil.rmtree(at / "model"), (at / "model").symlink_to("/dev")),
    "64 dimensions": lambda at: lay_index(at, {"shape": [1] * 64}),
    "65 dimensions": lambda at: lay_index(at, {"shape": [1] * 65}),
    "a mesh of all ranks that there can be": lambda at: edited(at, "index.json", '"mesh":[1', '"mesh":[16777216'),
    "a header of 1 GB": lambda at: (
        os.truncate(at / "shared.safetensors", 1 << 30),
        lay_header(at, ((1 << 30) - 8).to_bytes(8, "little")),
    ),
    "a header of 10 TB": lambda at: lay_header(at, TEN_TB.to_bytes(8, "little")),
    "a header that is the file": lambda at: lay_header(
        at, ((at / "shared.safetensors").stat().st_size - 8).to_bytes(8, "little")
    ),
    "a tensor of 10 TB": lambda at: edited(at, "index.json", '"shape":[7', f'"shape":[{TEN_TB}'),
    "a state too deep": deep_state,
    "an index too deep": lambda at: ((at / "index.json").write_text(DEEP), agreeing_manifest(at)),
    "a manifest too deep": lambda at: (at / "manifest.json").write_text(DEEP),
    "a manifest of 100 MB": lambda at: (at / "manifest.json").write_text(" " * 100_000_000),
    "a number of a million digits": lambda at: edited(at, "index.json", '"shape":[7', f'"shape":[{"7" * 1_000_000}'),
    "a file of 10 TB on paper": lambda at: claim_size(at, TEN_TB),
    "a file that is a hole": hole,
    "a folder elsewhere": folder_elsewhere,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_costs_little_memory(tmp_path: Path, lie: str) -> None:
    """Uses less than half a gigabyte at any claimed size; nothing is loaded."""
    manager = CheckpointManager(tmp_path)
    Saved().save(manager, 1)
    LIES[lie](manager.path_of(1))
    (error,) = run_ranks(jobs.load_in_little_memory, 1, tmp_path, 500_000_000)
    assert error.startswith(("DamagedCheckpoint: ", "StateMismatch: ")), error
