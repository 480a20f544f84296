"""Memory and disk space, checked before a save: training waits if memory is short; a full disk refuses the save."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import dalsegno as ds
from checkpoint import jobs
from dalsegno.checkpoint import Checkpoint, CheckpointManager, ModelState, file_writing
from dalsegno.system import filesystem, machine
from dalsegno.testing import run_ranks
from support.disks import small_disk
from support.heavy import (
    MB,
    Overtaken,
    heavy_trainer,
    train_in_group,
    train_in_little_address_space,
    train_where_one_rank_is_short,
    warnings_of,
)

SHORT = re.compile(
    r"an async save needs (\S+ \wB) more memory for a copy of the state, and (\S+ \wB) are available: "
    r"checkpoints are written while training waits"
)


def whole_steps(output_dir: Path) -> list[int]:
    """Of the checkpoints there, every byte of which is compared with their manifests."""
    steps = []
    for path in sorted((output_dir / "checkpoints").iterdir()):
        checkpoint = Checkpoint.open(path)
        checkpoint.verify(checkpoint.manifest.files)
        steps.append(checkpoint.step)
    return steps


# --- memory -----------------------------------------------------------------------------------------------------------


def test_training_continues_if_there_is_memory_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overtaken = Overtaken()
    monkeypatch.setattr(filesystem, "watcher", overtaken)
    trainer = heavy_trainer(tmp_path, overtaken.callback, megabytes=1, max_steps=6, save_steps=2)
    assert warnings_of(trainer.train) == []
    assert overtaken.steps == [2, 4], "and behind the last save there is no step"


def test_without_memory_for_a_copy_training_waits_and_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overtaken = Overtaken()
    monkeypatch.setattr(filesystem, "watcher", overtaken)
    monkeypatch.setattr(machine, "_of_host", lambda: 3 * MB)
    trainer = heavy_trainer(tmp_path, overtaken.callback, megabytes=8, max_steps=6, save_steps=2)
    (warning,) = warnings_of(trainer.train)
    figures = SHORT.fullmatch(warning)
    assert figures is not None and figures[2] == "3 MB" and re.fullmatch(r"8\.\d+ MB", figures[1]), warning
    assert overtaken.steps == []
    assert whole_steps(tmp_path) == [2, 4, 6]


def test_it_is_looked_at_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overtaken = Overtaken()
    monkeypatch.setattr(filesystem, "watcher", overtaken)
    monkeypatch.setattr(machine, "_of_host", lambda: 3 * MB if trainer.state.global_step < 4 else 30 * MB)
    trainer = heavy_trainer(tmp_path, overtaken.callback, megabytes=8, max_steps=6, save_steps=2)
    assert len(warnings_of(trainer.train)) == 1
    assert overtaken.steps == [4]


@pytest.mark.parametrize(("ranks_here", "is_short"), [(4, False), (5, True)])
def test_the_host_is_shared_by_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks_here: int, is_short: bool
) -> None:
    """Each needs 8 MB, and leaves a tenth of its part for training."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_here))
    monkeypatch.setattr(machine, "_of_host", lambda: 40 * MB)
    lines = warnings_of(heavy_trainer(tmp_path, megabytes=8, max_steps=2, save_steps=2).train)
    assert [SHORT.fullmatch(line)[2] for line in lines] == (["8 MB"] if is_short else [])  # type: ignore[index]


def test_if_one_rank_is_short_all_wait(tmp_path: Path) -> None:
    (first, silent), (second, lines) = run_ranks(train_where_one_rank_is_short, 2, tmp_path)
    assert first == second == [] and silent == []
    assert len(lines) == 1 and SHORT.fullmatch(lines[0])
    assert whole_steps(tmp_path) == [2, 4]


@pytest.mark.parametrize("spare", [20 * MB, 200 * MB])
def test_a_limit_of_the_shell(tmp_path: Path, spare: int) -> None:
    """``ulimit -v``, which the host's free memory knows nothing of: there may be none for threads either."""
    ((step, lines),) = run_ranks(train_in_little_address_space, 1, tmp_path, spare)
    assert step == 4 and len(lines) == 1 and SHORT.fullmatch(lines[0]), lines
    assert whole_steps(tmp_path) == [2, 4]


def test_a_save_where_memory_is_short_writes_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors, strides, more than is copied at once, and lengths that fill no page."""
    model = nn.Module()
    model.register_buffer("numbers", torch.arange(1_000_003))
    model.register_buffer("transposed", torch.randn(1500, 1001).T)
    model.register_buffer("complex", torch.randn(333, dtype=torch.complex64).conj())
    for number in range(50):
        model.register_buffer(f"small-{number}", torch.full((number,), number, dtype=torch.bfloat16))
    there_is_memory, short = (CheckpointManager(tmp_path / each) for each in ("there-is-memory", "short"))
    one = Checkpoint.open(there_is_memory.save(1, [ModelState(model)], []))
    monkeypatch.setattr(machine, "_of_host", lambda: 10 * MB)
    monkeypatch.setattr(file_writing, "_one_ahead", None)
    other = Checkpoint.open(short.save(1, [ModelState(model)], []))
    for name in one.manifest.files:
        assert (one.path / name).read_bytes() == (other.path / name).read_bytes()


@pytest.fixture
def tight_group() -> Iterator[Path]:
    """The list of processes of a new control group that may have 400 MB."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"dalsegno-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(400 * MB))
            yield group / "cgroup.procs"
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("no control group can be made here")


def test_a_limit_of_the_control_group(tight_group: Path) -> None:
    """As of a container. Beyond it, the kernel kills. Files in memory would count, so these are not in ``tmp_path``."""
    with tempfile.TemporaryDirectory() as folder:
        (lines,) = run_ranks(train_in_group, 1, Path(folder), tight_group)
        assert len(lines) == 1 and SHORT.fullmatch(lines[0]), lines
        assert whole_steps(Path(folder)) == [2, 4]


# --- disk -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_does_not_fit_is_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    written: list[str] = []
    monkeypatch.setattr(filesystem, "watcher", lambda operation, path: written.append(f"{operation} {path}"))
    with small_disk(tmp_path / "disk", kilobytes=10_000) as disk:
        trainer = heavy_trainer(disk, megabytes=4, max_steps=6, save_steps=2, save_in_background=background)
        with pytest.raises(ds.SaveFailed) as caught:
            trainer.train()
        found = re.fullmatch(
            r"step-00000006 was not saved: it takes (4\.\d+) MB, and ([\d.]+) (k|M)B are free on the disk of .*",
            str(caught.value),
        )
        assert found is not None, str(caught.value)
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
        assert float(found[2]) * {"k": 1e3, "M": 1e6}[found[3]] == pytest.approx(free, abs=20_000)
        assert whole_steps(disk) == [2, 4]
    third = [each for each in written if "step-00000006" in each]
    assert third and not [each for each in third if each.startswith("write")]


def test_what_all_ranks_write_must_fit(tmp_path: Path) -> None:
    """Each alone would."""
    with small_disk(tmp_path / "disk", kilobytes=6_000) as disk:
        first, second = run_ranks(jobs.save_notes_of, 2, disk, 4 * MB)
        assert first == second
        assert re.search(r"^SaveFailed: .* it takes 8\.\d+ MB, and 6\.\d+ MB are free on the disk of ", first), first
        assert list((disk / "checkpoints").iterdir()) == []
        first, second = run_ranks(jobs.save_notes_of, 2, disk, 2 * MB)
        assert first == second == "saved"
        assert CheckpointManager(disk).find() is not None
