"""Each file of a checkpoint damaged in turn, in every way: it is found and named, and the one before is used."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.checkpoint import CheckpointManager
from dalsegno.testing import compare_runs, run_ranks
from support.runs import busy_trainer

OLDER, NEWER = "step-00000006", "step-00000008"
Damage = Callable[[Path, random.Random], object]


def flip(path: Path, dice: random.Random) -> None:
    """One bit."""
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def flip_an_end(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[dice.choice([0, -1])] ^= 0x80
    path.write_bytes(content)


def cut(path: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size))


def grow(path: Path, dice: random.Random) -> None:
    with path.open("ab") as file:
        file.write(b"\0" * dice.randint(1, 4096))


def blank_a_page(path: Path, dice: random.Random) -> None:
    """What a disk gives back for a block that it has lost: as many bytes, of something else."""
    content = path.read_bytes()
    begin = dice.randrange(0, len(content), 4096)
    lost = content[begin : begin + 4096]
    path.write_bytes(content[:begin] + bytes(byte ^ 0xFF for byte in lost) + content[begin + 4096 :])


def take_the_older_ones(path: Path, dice: random.Random) -> None:
    shutil.copyfile(Path(str(path).replace(NEWER, OLDER)), path)


def put_a_link(path: Path, dice: random.Random) -> None:
    aside = path.with_name(f"{path.name}.aside")
    path.rename(aside)
    path.symlink_to(aside)


def put_a_folder(path: Path, dice: random.Random) -> None:
    path.unlink()
    path.mkdir()


def put_a_pipe(path: Path, dice: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


WAYS: dict[str, tuple[Damage, int]] = {
    "a flipped bit": (flip, 12),
    "a flipped end": (flip_an_end, 2),
    "cut off": (cut, 4),
    "grown": (grow, 1),
    "a lost block": (blank_a_page, 2),
    "deleted": (lambda path, dice: path.unlink(), 1),
    "the older one's": (take_the_older_ones, 1),
    "a link": (put_a_link, 1),
    "a folder": (put_a_folder, 1),
    "a pipe": (put_a_pipe, 1),
}
"""How, and how often for each file."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last two checkpoints of a run of two ranks."""
    folder = tmp_path_factory.mktemp("finished")
    run_ranks(train_fsdp, 2, folder / "run")
    return folder / "run"


def train_fsdp(output_dir: Path) -> None:
    busy_trainer(output_dir, "fsdp", 8).train()


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file())


def fresh_copy(run: Path, folder: Path) -> CheckpointManager:
    for name in (OLDER, NEWER):
        shutil.copytree(run / "checkpoints" / name, folder / "checkpoints" / name)
    return CheckpointManager(folder)


@pytest.mark.parametrize("way", WAYS)
def test_all_of_it_is_found(finished: Path, tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture) -> None:
    damage, times = WAYS[way]
    names = files_of(finished / "checkpoints" / NEWER)
    assert len(names) >= 9
    for name in names:
        for number in range(times):
            folder = tmp_path / f"{name.as_posix().replace('/', '-')}-{number}"
            manager = fresh_copy(finished, folder)
            hurt = folder / "checkpoints" / NEWER / name
            damage(hurt, random.Random(f"{name}/{number}"))
            if way == "the older one's" and name.name == "index.json":
                continue  # which is the same: nothing has moved
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                found = manager.find()
            assert found is not None and found.path.name == OLDER, (name, number)
            assert sorted(path.name for path in manager.directory.iterdir()) == [OLDER, f"{NEWER}.damaged"]
            assert name.name in caplog.text
            shutil.rmtree(folder)


def test_a_run_goes_on_from_the_one_before(tmp_path: Path) -> None:
    """And ends as if nothing had been damaged; what was set aside stays for who wants to look at it."""
    busy_trainer(tmp_path / "whole", max_steps=16).train()
    busy_trainer(tmp_path / "hurt", max_steps=16).train()
    newest = tmp_path / "hurt" / "checkpoints" / "step-00000016"
    flip(newest / "model" / "shard-00000.safetensors", random.Random(0))
    assert busy_trainer(tmp_path / "hurt", max_steps=16).train().global_step == 16
    comparison = compare_runs(tmp_path / "whole", tmp_path / "hurt")
    assert comparison.identical, f"\n{comparison.table()}"
    assert newest.with_name(f"{newest.name}.damaged").is_dir()
