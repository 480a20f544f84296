"""A checkpoint made by an enemy: pickles in place of our files. It is refused, and nothing of it runs.

In a process of its own, with an audit hook that ends it at once if anything is unpickled, compiled, executed or
started while the checkpoint is searched for and loaded.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash
from checkpoint.parts import Saved

from dalsegno.checkpoint import CheckpointManager
from dalsegno.checkpoint.manifest import _checksum_of

VICTIM = """
import sys, os
from pathlib import Path
import checkpoint.parts as parts
from dalsegno.checkpoint import CheckpointManager
from dalsegno.errors import DamagedCheckpoint, NotFound, StateMismatch

# once, so that whatever is imported or compiled on first use is there before the hook
warm, saved = CheckpointManager(Path(sys.argv[1]) / "warm"), parts.Saved()
saved.save(warm, 1)
warm.load(warm.find(), saved.sharded, saved.components)

FORBIDDEN = ("pickle.find_class", "exec", "compile", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn")

def hook(event, args):
    if event in FORBIDDEN:
        os.write(2, f"FORBIDDEN {event} {args!r}".encode()[:2000])
        os._exit(66)

sys.addaudithook(hook)
manager = CheckpointManager(Path(sys.argv[1]))
try:
    found = manager.find(manager.path_of(1))
    manager.load(found, saved.sharded, saved.components)
except (DamagedCheckpoint, StateMismatch) as error:
    print("refused:", error)
"""


class Bomb:
    def __reduce__(self) -> Any:
        return exec, ("import pathlib; pathlib.Path('/tmp/dalsegno-bomb').touch()",)


def agreeing_manifest(directory: Path) -> None:
    """Make the manifest say of every file what it is now, as an enemy would."""
    path = directory / "manifest.json"
    content = json.loads(path.read_bytes())
    for name in content["files"]:
        data = (directory / name).read_bytes()
        content["files"][name] = {"size": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}
    del content["xxh3"]
    path.write_text(json.dumps(content | {"xxh3": _checksum_of(content)}))


def load_as_victim(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", VICTIM, str(directory)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        timeout=100,
    )


@pytest.mark.parametrize("manifest_agrees", [False, True])
def test_pickles_in_place_of_everything(tmp_path: Path, manifest_agrees: bool) -> None:
    """All files at once; and, where the manifest agrees, one after the other: each is the first that is read wrongly."""
    manager = CheckpointManager(tmp_path)
    Saved().save(manager, 1)
    directory = manager.path_of(1)
    payload = pickle.dumps(Bomb())
    for path in directory.rglob("*.*"):
        if path.name != "manifest.json":
            path.write_bytes(payload.ljust(path.stat().st_size, b"."))
    if manifest_agrees:
        agreeing_manifest(directory)
    ended = load_as_victim(tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("refused: "), ended.stdout


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
    ended = load_as_victim(tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "manifest.json" in ended.stdout


def edited(directory: Path, name: str, old: str, new: str) -> None:
    path = directory / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    agreeing_manifest(directory)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("index.json", '"file":"model/shard-00000.safetensors"', '"file":"../../../../etc/passwd"'),
        ("index.json", '"file":"model/shard-00000.safetensors"', '"file":"optimizer"'),
        ("index.json", '"bytes":[', '"bytes":[99999999,'),
        ("index.json", '"offsets":[0', '"offsets":[1'),
        ("index.json", '"dtype":"float32"', '"dtype":"load"'),
        ("index.json", '"shape":[7', '"shape":[7000000000000'),
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
