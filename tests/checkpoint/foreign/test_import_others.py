"""Runs of Lightning, Accelerate, DCP, torchtitan and plain loops, imported and continued here."""

from __future__ import annotations

import itertools
import pickle
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from dalsegno.checkpoint import Checkpoint, read_tensors
from dalsegno.checkpoint.foreign import pickles
from dalsegno.checkpoint.foreign.programs import Imported, import_checkpoint
from dalsegno.checkpoint.sidecar import SavedStates
from dalsegno.errors import ConfigurationError, StateMismatch

from .other_programs import BEGUN, STEPS, Loop, continued_here, in_order, model, one_group
from .touch import Touch


@pytest.fixture(scope="module")
def expected() -> Loop:
    """The whole run, in one loop."""
    return Loop.new().run(0, STEPS)


@pytest.fixture
def begun() -> Loop:
    return Loop.new().run(0, BEGUN)


def assert_continues(done: Imported, expected: Loop) -> None:
    """That the 20 steps after the checkpoint, here, have the losses and the end of the one loop."""
    assert done.run.step == BEGUN and done.can_resume
    losses, net = continued_here(done.checkpoint.parents[1])
    np.testing.assert_allclose(losses, expected.losses[BEGUN:], rtol=1e-5)
    for name, each in net.state_dict().items():
        torch.testing.assert_close(each, expected.net.state_dict()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"step": torch.tensor(torch.nan)}, "cannot convert float NaN"),
        ({"step": -5}, "step=-5; needs a count"),
        ({"step": 2**70}, f"step={2**70}; needs a count"),
        ({"epoch": float("nan")}, "cannot convert float NaN"),
        ({"epoch": float("inf")}, "cannot convert float infinity"),
        ({"epoch": -0.5}, "epoch=-1; needs a count"),
    ],
)
def test_counts_that_cannot_be_are_refused(changed: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.ones(2)}, "step": 1, **changed}, tmp_path / "last.pt")
    with pytest.raises(StateMismatch, match=complaint):
        import_checkpoint(tmp_path / "last.pt", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for more in ({"step": -1}, {"epoch": float("nan")}):
        with pytest.raises(ConfigurationError, match=f"{next(iter(more))}=.*; needs a finite number"):
            import_checkpoint(tmp_path / "last.pt", tmp_path / "run", **more)  # type: ignore[arg-type]


def test_arrays_of_a_schedule_are_taken(tmp_path: Path) -> None:
    table = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    schedule = {"table": table, "more": [(np.array(3), np.arange(2, dtype=">i4"))], "empty": np.zeros((0, 2))}
    torch.save({"model": {"weight": torch.ones(2)}, "step": 1, "scheduler": schedule}, tmp_path / "last.pt")
    done = import_checkpoint(tmp_path / "last.pt", tmp_path / "run")
    found = SavedStates(Checkpoint.open(done.checkpoint)).state("scheduler.0")
    np.testing.assert_array_equal(found["table"], table)
    np.testing.assert_array_equal(found["more"][0][1], [0, 1])
    assert found["more"][0][0] == 3 and found["empty"].shape == (0, 2)
    schedule["itself"] = schedule
    torch.save({"model": {"weight": torch.ones(2)}, "step": 1, "scheduler": schedule}, tmp_path / "last.pt")
    with pytest.raises(StateMismatch, match="RecursionError"):
        import_checkpoint(tmp_path / "last.pt", tmp_path / "other")


def test_a_file_of_torch_save(begun: Loop, expected: Loop, tmp_path: Path) -> None:
    torch.save(
        {
            "model_state_dict": {
                f"module.{name}": each for name, each in begun.net.state_dict().items()
            },  # as under DDP
            "optimizer_state_dict": begun.optimizer.state_dict(),
            "scheduler": begun.schedule.state_dict(),
            "epoch": 0,
            "best": {1, 2},
        },
        tmp_path / "last.pt",
    )
    done = import_checkpoint(tmp_path / "last.pt", tmp_path / "run", epoch=BEGUN / len(in_order()))
    assert done.run.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert done.run.left_out["best"] == "unknown to a run here"
    assert_continues(done, expected)


def test_a_bare_state_dict_and_what_is_missing(begun: Loop, tmp_path: Path) -> None:
    matrix = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    views = {"transposed": matrix.t(), "row": matrix.detach()[1], "trained": matrix}
    torch.save({**begun.net.state_dict(), **views}, tmp_path / "weights.pth")
    done = import_checkpoint(tmp_path / "weights.pth", tmp_path / "run")
    assert not done.can_resume
    written = read_tensors(Checkpoint.open(done.checkpoint))["model"]
    assert all(torch.equal(written[name], each) for name, each in views.items())
    assert {"optimizer", "log", "place in the data", "random generators"} <= done.run.left_out.keys()


def test_dcp(begun: Loop, expected: Loop, tmp_path: Path) -> None:
    state = {
        "model": get_model_state_dict(begun.net),
        "optimizer": get_optimizer_state_dict(begun.net, begun.optimizer),
        "scheduler": begun.schedule.state_dict(),
        "step": BEGUN,
        "epoch": BEGUN / len(in_order()),
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    done = import_checkpoint(tmp_path / "dcp", tmp_path / "run")
    assert done.run.optimizer is not None and not done.run.optimizer.is_by_position
    assert_continues(done, expected)


def test_torchtitan(begun: Loop, expected: Loop, tmp_path: Path) -> None:
    """Its layout: the model at the top, the optimizer flattened."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        **get_model_state_dict(begun.net),
        "optimizer": get_optimizer_state_dict(begun.net, begun.optimizer, options=flat),
        "lr_scheduler": begun.schedule.state_dict(),
        "dataloader": {"dp_rank_0": b"a pickle", "world_size": 1},
        "train_state": {"step": torch.tensor(BEGUN, dtype=torch.int32), "ntokens_seen": torch.tensor(96)},
    }
    dcp.save(state, checkpoint_id=tmp_path / "step-6", no_dist=True)
    done = import_checkpoint(tmp_path / "step-6", tmp_path / "run", epoch=BEGUN / len(in_order()))
    assert done.run.program == "torchtitan"
    assert "dataloader" in done.run.left_out
    assert_continues(done, expected)


def test_accelerate(expected: Loop, tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = model()
    optimizer, schedule = one_group(net)
    loader, net, optimizer, schedule = accelerator.prepare(in_order(), net, optimizer, schedule)
    for batch in itertools.islice(loader, BEGUN):
        accelerator.backward(net(**batch).loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.save_state(str(tmp_path / "state"))
    # Two processes would have saved these: each one's generators, and a schedule that counts each step twice.
    shutil.copy(tmp_path / "state/random_states_0.pkl", tmp_path / "state/random_states_1.pkl")
    torch.save({**schedule.state_dict(), "last_epoch": 2 * BEGUN, "_step_count": 13}, tmp_path / "state/scheduler.bin")
    done = import_checkpoint(tmp_path / "state", tmp_path / "run", epoch=BEGUN / len(in_order()))
    assert done.run.program == "Accelerate" and done.run.schedulers[0]["last_epoch"] == BEGUN
    assert_continues(done, expected)


def test_lightning(expected: Loop, tmp_path: Path) -> None:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 16})
            self.net = model()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            optimizer, schedule = one_group(self.net)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=BEGUN)
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        max_steps=BEGUN,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        callbacks=[saving],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), in_order())
    done = import_checkpoint(tmp_path / "last.ckpt", tmp_path / "run", strip_prefix="net.")
    assert done.run.place.microbatches == BEGUN
    assert "hyper_parameters" in done.run.left_out
    assert any(part.startswith("callback ModelCheckpoint") for part in done.run.left_out)
    assert_continues(done, expected)


@pytest.mark.parametrize("where", ["metadata", "item"])
def test_code_in_a_dcp_folder_is_refused(where: str, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    dcp.save(
        {"model": nn.Linear(2, 2).state_dict(), "more": Touch(tmp_path / "ran")}, checkpoint_id=folder, no_dist=True
    )
    if where == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    with pytest.raises(StateMismatch, match=r"refused: names posix\.system"):
        import_checkpoint(folder, tmp_path / "run")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()


def test_a_dcp_folder_changes_no_class(tmp_path: Path) -> None:
    dcp.save({"model": nn.Linear(2, 2).state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / ".metadata").write_bytes(
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadataIndex\nN}X\x01\x00\x00\x00xK\x01s\x86b."
    )
    with pytest.raises(StateMismatch, match="describes no checkpoint"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "run")
    assert not hasattr(MetadataIndex, "x")


def test_a_dcp_folder_without_a_chunk_is_refused(tmp_path: Path) -> None:
    dcp.save({"model": nn.Linear(2, 2).state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.weight"].chunks.clear()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(StateMismatch, match=r"chunks of model\.weight are not the whole tensor"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "run")


@pytest.mark.parametrize("where", ["ndarray", "multiarray.scalar"])
def test_addresses_in_a_file_are_no_objects(where: str, tmp_path: Path) -> None:
    """NumPy would take the bytes of an array of objects for addresses in memory."""
    objects = b"cnumpy\ndtype\nX\x01\x00\x00\x00O\x85R"
    address = b"c_codecs\nencode\nX\x08\x00\x00\x00AAAAAAAAX\x06\x00\x00\x00latin1\x86R"
    call = {
        "ndarray": b"cnumpy\nndarray\n(K\x01\x85" + objects + address + b"tR",
        "multiarray.scalar": b"cnumpy.core.multiarray\nscalar\n" + objects + address + b"\x86R",
    }[where]
    torch.save({}, whole := tmp_path / "whole.pt")
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(tmp_path / "crafted.pt", "w") as target:
        for name in source.namelist():
            target.writestr(name, b"\x80\x02" + call + b"." if name.endswith("data.pkl") else source.read(name))
    with pytest.raises(StateMismatch, match=r"unpickler reads \(arrays of 'O' are not arrays of numbers\)"):
        pickles.load(tmp_path / "crafted.pt")


def test_numbers_are_as_saved_and_arrays_are_passed_over(tmp_path: Path) -> None:
    saved = {"lr": np.float64(0.1), "big": np.arange(3, dtype=">i4")[1], "loss": np.float32(2.5)}
    torch.save({**saved, "random": np.random.get_state(), "empty": np.zeros((0, 3))}, tmp_path / "numbers.pt")
    loaded = pickles.load(tmp_path / "numbers.pt")
    assert {name: loaded[name] for name in saved} == saved
    assert type(loaded["loss"]) is np.float32 and not isinstance(loaded["empty"], np.ndarray)


@pytest.mark.parametrize("kind", ["plain.pt", "script.pt", "old.tar", "train.py"])
def test_no_reason_advises_against_safety(tmp_path: Path, kind: str, recwarn: pytest.WarningsRecorder) -> None:
    file = tmp_path / kind
    if kind == "script.pt":
        torch.jit.save(torch.jit.script(nn.Linear(1, 1)), file)  # type: ignore[no-untyped-call]
    elif kind == "old.tar":
        with tarfile.open(file, "w") as archive:
            for name in ("storages", "tensors", "pickle"):
                archive.addfile(tarfile.TarInfo(name))
    else:
        file.write_bytes(pickle.dumps({"model": 1}) if kind == "plain.pt" else b"class Net:\n    pass\n")
    recwarn.clear()
    with pytest.raises(StateMismatch) as refused:
        pickles.load(file)
    assert not recwarn.list
    assert "weights_only" not in str(refused.value) and "trusted" not in str(refused.value)


def test_what_no_program_wrote_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not recognized as a checkpoint of Hugging Face Trainer, Accelerate"):
        import_checkpoint(tmp_path, tmp_path / "run")
