"""Files for tensors that arrive: only finite tensors get a name, and old files serve again."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dalsegno.diloco import nesterov
from dalsegno.diloco.server.files import PIECE, SpareFiles, _is_finite, spooled
from dalsegno.diloco.server.run import OuterRun
from dalsegno.diloco.wire.signature import Specs, TensorSpec
from dalsegno.errors import ConfigurationError
from dalsegno.system import filesystem
from diloco.scenes import Given, play, values

WIDTHS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def specs_of(dtype: torch.dtype, *counts: int) -> Specs:
    return tuple(TensorSpec(f"p.{number}", dtype, (count,)) for number, count in enumerate(counts))


@given(st.data())
@settings(deadline=None)
def test_any_bits_are_told_apart(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(WIDTHS)))
    bits = 8 * dtype.itemsize
    drawn = data.draw(st.lists(st.integers(-(1 << bits - 1), (1 << bits - 1) - 1), min_size=1, max_size=5))
    tensor = torch.tensor(drawn, dtype=WIDTHS[dtype]).view(dtype)
    assert _is_finite(dtype)(tensor.view(torch.uint8).numpy()) == bool(torch.isfinite(tensor).all())


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(tmp_path: Path, dtype: torch.dtype, bad: float) -> None:
    specs = specs_of(dtype, 3, PIECE // dtype.itemsize + 5)
    for name, place in (("p.0", 0), ("p.1", -1), ("p.1", PIECE // dtype.itemsize - 1)):
        tensors = {each: tensor.clone() for each, tensor in values(specs, 0).items()}
        tensors[name][place] = bad
        with (
            pytest.raises(ConfigurationError, match=f"{name} contains NaN or infinity"),
            spooled(SpareFiles(tmp_path), specs, Given(specs, tensors)),
        ):
            pass


def test_a_file_that_is_not_kept_is_overwritten_by_a_larger_and_a_smaller_one(tmp_path: Path) -> None:
    files = SpareFiles(tmp_path)
    for number, counts in enumerate([(7,), (PIECE, 9), (3, 3)]):
        specs = specs_of(torch.float32, *counts)
        with spooled(files, specs, Given(specs, values(specs, number))) as arrived:
            assert len(list(tmp_path.iterdir())) == 1
            stored = load_file(arrived.path)
        assert all(torch.equal(stored[name], tensor) for name, tensor in values(specs, number).items())


def test_two_servers_in_one_process_have_files_of_their_own(tmp_path: Path) -> None:
    """One that was stopped may still receive when the next one begins."""
    specs = specs_of(torch.float32, 4)
    former, present = SpareFiles(tmp_path), SpareFiles(tmp_path)
    with (
        spooled(former, specs, Given(specs, values(specs, 0))) as late,
        spooled(present, specs, Given(specs, values(specs, 1))) as arrived,
    ):
        assert torch.equal(load_file(late.path)["p.0"], values(specs, 0)["p.0"])
        arrived.keep(tmp_path / "kept")
    assert torch.equal(load_file(tmp_path / "kept")["p.0"], values(specs, 1)["p.0"])


def test_a_full_disk_gets_its_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, specs = SpareFiles(tmp_path), specs_of(torch.float32, PIECE)

    def full(what: str, path: Path) -> None:
        if what == "write" and path.exists() and path.stat().st_size > PIECE:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "watcher", full)
        with (
            pytest.raises(OSError, match="No space left"),
            spooled(files, specs, Given(specs, values(specs, 0))),
        ):
            pass
    assert not list(tmp_path.iterdir())
    with spooled(files, specs, Given(specs, values(specs, 1))) as arrived:
        assert torch.equal(load_file(arrived.path)["p.0"], values(specs, 1)["p.0"])


def test_a_file_that_is_kept_is_left_alone_until_it_is_given_back(tmp_path: Path) -> None:
    files, specs = SpareFiles(tmp_path), specs_of(torch.float32, 4)
    with spooled(files, specs, Given(specs, values(specs, 0))) as arrived:
        arrived.keep(tmp_path / "first")
    with spooled(files, specs, Given(specs, values(specs, 1))) as arrived:
        arrived.keep(tmp_path / "second")
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".partial") == ["first", "second"]
    assert torch.equal(load_file(tmp_path / "first")["p.0"], values(specs, 0)["p.0"])
    inode = (tmp_path / "first").stat().st_ino
    files.give_back(tmp_path / "first")
    with spooled(files, specs, Given(specs, values(specs, 2))) as arrived:
        assert arrived.path.stat().st_ino == inode
    files.delete_all()
    assert [path.name for path in tmp_path.iterdir()] == ["second"]


def test_a_server_writes_old_submissions_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two submissions in each round, and a checkpoint after every second one; at the end none is left."""
    submissions, files = tmp_path / "diloco/submissions", set()

    def watch(what: str, path: Path) -> None:
        if what == "fsync" and path.parent == submissions:
            files.add(path.stat().st_ino)

    monkeypatch.setattr(filesystem, "watcher", watch)
    play(tmp_path, 9, save_every=2)
    assert 0 < len(files) <= 4
    assert not list(submissions.iterdir())


def test_a_version_that_cannot_be_written_leaves_its_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, rename = tmp_path / "diloco/versions", filesystem.rename_nosync

    def refuse(source: Path, target: Path) -> None:
        if target.suffix == ".frame":
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        rename(source, target)

    monkeypatch.setattr(filesystem, "rename_nosync", refuse)
    with pytest.raises(OSError, match="No space left"):
        play(tmp_path, 2)
    assert not list(versions.iterdir())


def test_a_version_that_a_power_cut_mixed_up_is_made_again(tmp_path: Path) -> None:
    """A version's file is not fsynced: after a power cut it may have some of the bytes that were there before."""
    play(tmp_path, 3, save=False)
    versions = tmp_path / "diloco/versions"
    newest = max(path for path in versions.iterdir() if path.suffix == ".frame")
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-40] + bytes(24) + whole[-16:])
    OuterRun(tmp_path, nesterov(), 2).close(save=False)
    assert newest.read_bytes() == whole


def test_a_version_whose_file_a_power_cut_left_as_it_was_is_made_again(tmp_path: Path) -> None:
    """A file that was overwritten has, by the new name, a former version, with the right checksum."""
    play(tmp_path, 3, save=False)
    versions = tmp_path / "diloco/versions"
    former, newest = sorted(path for path in versions.iterdir() if path.suffix == ".frame")[-2:]
    whole = newest.read_bytes()
    newest.write_bytes(former.read_bytes())
    OuterRun(tmp_path, nesterov(), 2).close(save=False)
    assert newest.read_bytes() == whole
